#include <immintrin.h>

#include "limits/limits_loops.h"

namespace pagemill::limits_detail {
namespace {

struct F32 {
  using Vec = __m512;
  static constexpr int kLanes = 16, kSums = 12, kFlops = 2;
  static Vec start(int64_t x) { return _mm512_set1_ps(1e-9f * static_cast<float>(x)); }
  static Vec step(Vec sum, Vec x) { return _mm512_fmadd_ps(sum, x, x); }
  static void keep(Vec& v) { __asm__ volatile("" : "+v"(v)); }
};

}  // namespace

const Kernels* avx512_kernels() {
  static const Kernels kernels = {{run_flops<F32>, run_flops<F32>}, run_read, run_read_pieces};
  return &kernels;
}

}  // namespace pagemill::limits_detail
