// What an instruction set offers soft_cap: see softcap_loops.h for how it is made.
#pragma once

#include <cstdint>

namespace pagemill::softcap_detail {

struct Kernels {
  void (*soft_cap)(float* x, int64_t count, float cap);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace pagemill::softcap_detail
