// What the machine can do at most, for benchmarks: products from registers, and reading memory. Times are
// taken by the caller.
#pragma once

#include <cstdint>

namespace pagemill {

// Multiply and add in registers alone, on every thread, `rounds` times; returns the operations done (a
// product and a sum are two). float32, or bfloat16 pairs where the path multiplies them.
double peak_flops(int dtype, int64_t rounds);

// Read `bytes` (whole words of 8) from `from`, split among the threads, each reading several streams;
// returns their sum as words, so that none is skipped.
uint64_t read_memory(uintptr_t from, int64_t bytes);

// Read `count` pieces of piece_bytes, a multiple of 64, in an order (int64 [count], which piece after
// `from`), as a paged cache is read; the threads take equal shares of it. Returns their sum as words.
uint64_t read_pieces(uintptr_t from, int64_t piece_bytes, uintptr_t order, int64_t count);

}  // namespace pagemill
