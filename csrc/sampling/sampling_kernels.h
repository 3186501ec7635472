// What an instruction set offers sampling: the loops over whole rows. See sampling_loops.h.
#pragma once

#include <cstdint>

namespace pagemill::sampling_detail {

inline constexpr int64_t kBlock = 256;

struct Kernels {
  // Write each block's maximum; return whether the row holds a NaN (which no maximum is).
  bool (*block_maxima)(const float* row, int64_t size, float* maxima);
  // weights = exp((row - highest) / divisor); weights may be row.
  void (*weigh)(const float* row, int64_t size, float highest, float divisor, float* weights);
  // Each block's sum of the weights that are over `level`, or equal to it with an index <= last.
  void (*block_sums)(const float* weights, int64_t size, float level, int64_t last, double* sums);
  // The sum over the row of exp(row - highest).
  double (*exp_sum)(const float* row, int64_t size, float highest);
  // How many entries are over `value`.
  int64_t (*count_over)(const float* row, int64_t size, float value);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace pagemill::sampling_detail
