// What an instruction set offers the operations of pointwise.h: see pointwise_loops.h.
#pragma once

#include <cstdint>

namespace pagemill::pointwise_detail {

constexpr int kActivations = 6;

struct Kernels {
  void (*activate[2][kActivations])(void* x, int64_t count);  // by dtype, by activation
  void (*add[2])(void* x, const void* y, int64_t count);      // by dtype
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace pagemill::pointwise_detail
