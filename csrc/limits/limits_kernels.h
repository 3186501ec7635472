// What an instruction set offers `limits`.
#pragma once

#include <cstdint>

namespace pagemill::limits_detail {

struct Kernels {
  double (*flops[2])(int64_t rounds);  // by dtype
  uint64_t (*read)(const char* from, int64_t bytes);
  uint64_t (*read_pieces)(const char* from, int64_t bytes, const int64_t* order, int64_t first,
                          int64_t last);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();
const Kernels* amx_kernels();

}  // namespace pagemill::limits_detail
