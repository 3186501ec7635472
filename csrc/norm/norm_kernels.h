// What an instruction set offers the norms: see norm_loops.h for how it is made.
#pragma once

#include <cstdint>

namespace pagemill::norm_detail {

// Rows of one dtype; strides in elements.
struct Rows {
  const void* x;
  int64_t x_stride, size;
  const void *weight, *bias;
  float eps, offset;
  const void* residual;
  int64_t residual_stride;
  void* out;
  int64_t out_stride;
};

using RowsFn = void (*)(const Rows&, int64_t first, int64_t last);

// By dtype: float32, bfloat16.
struct Kernels {
  RowsFn rms_norm[2], layer_norm[2];
  void (*scale[2])(void* x, int64_t count, float factor);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace pagemill::norm_detail
