// Rows of a matrix that lies as it is: an embedding that no head shares.
#pragma once

#include <cstdint>

namespace pagemill {

// Copy row ids[i] (int64) of table[n, row_bytes] to out[i]; ids outside 0..n-1 throw.
void embedding(uintptr_t ids, int64_t count, uintptr_t table, int64_t n, int64_t row_bytes,
               uintptr_t out);

}  // namespace pagemill
