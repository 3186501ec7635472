// What an instruction set offers rotate_heads: see rope_loops.h for how it is made.
#pragma once

#include <cstdint>

namespace pagemill::rope_detail {

// One call; the numbers have one dtype, strides are in elements.
struct Heads {
  void* data;
  int64_t token_stride, num_heads, head_dim;
  const void* weight;
  float eps, offset;
  const void *cos, *sin;
  int64_t half;
  bool interleaved;
};

// Change the tokens first..last; `room` holds 2 * head_dim floats.
using HeadsFn = void (*)(const Heads&, int64_t first, int64_t last, float* room);

// By dtype: float32, bfloat16.
struct Kernels {
  HeadsFn rotate[2];
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace pagemill::rope_detail
