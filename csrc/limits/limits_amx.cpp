// The peak of bfloat16 tiles. Numbers and reading are those of the path before.
#include "common/tiles_peak.h"
#include "limits/limits_kernels.h"

namespace pagemill::limits_detail {
namespace {

Kernels make_kernels() {
  Kernels kernels = *avx512_bf16_kernels();
  kernels.flops[1] = run_tile_products<Bf16Products>;
  return kernels;
}

}  // namespace

const Kernels* amx_kernels() {
  static const Kernels kernels = make_kernels();
  return &kernels;
}

}  // namespace pagemill::limits_detail
