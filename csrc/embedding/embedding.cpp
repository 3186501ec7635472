#include "embedding/embedding.h"

#include <cstring>

#include "common/check.h"
#include "common/parallel.h"

namespace pagemill {

void embedding(uintptr_t ids, int64_t count, uintptr_t table, int64_t n, int64_t row_bytes,
               uintptr_t out) {
  constexpr const char* kOp = "embedding";
  check(count >= 0 && n >= 1 && row_bytes >= 1, kOp, "sizes", "must be positive");
  const int64_t* rows = reinterpret_cast<const int64_t*>(ids);
  for (int64_t i = 0; i < count; ++i)
    check(rows[i] >= 0 && rows[i] < n, kOp, "ids", "must be rows of the matrix");
  parallel_for(count, 64, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      std::memcpy(reinterpret_cast<char*>(out) + i * row_bytes,
                  reinterpret_cast<const char*>(table) + rows[i] * row_bytes,
                  static_cast<size_t>(row_bytes));
  });
}

}  // namespace pagemill
