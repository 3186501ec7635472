// Counts and sizes that operations have in common. Internal linkage: no code is shared between the files
// of different instruction sets.
#pragma once

#include <cstdint>

#include "common/check.h"
#include "common/vec.h"

namespace pagemill {

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// `parts` even parts of `count`: where part i begins.
static inline int64_t part_start(int64_t count, int64_t parts, int64_t i) {
  return count * i / parts;
}

static inline bool is_float(int dtype) { return dtype == static_cast<int>(Dtype::float32); }
static inline int64_t item_bytes(int dtype) { return is_float(dtype) ? 4 : 2; }

// Of an operation that takes numbers of two types.
static inline void check_dtype(int dtype, const char* op) {
  check(dtype == 0 || dtype == 1, op, "dtype", "must be 0 (float32) or 1 (bfloat16)");
}

}  // namespace pagemill
