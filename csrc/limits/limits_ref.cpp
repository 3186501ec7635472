#include "limits/limits_loops.h"

namespace pagemill::limits_detail {
namespace {

typedef float Floats __attribute__((vector_size(16)));

struct F32 {
  using Vec = Floats;
  static constexpr int kLanes = 4, kSums = 8, kFlops = 2;
  static Vec start(int64_t x) { return Vec{1e-9f * static_cast<float>(x), 0.0f, 0.0f, 0.0f}; }
  static Vec step(Vec sum, Vec x) { return sum * x + x; }
#if defined(__x86_64__)
  static void keep(Vec& v) { __asm__ volatile("" : "+x"(v)); }
#else
  static void keep(Vec& v) { __asm__ volatile("" : "+w"(v)); }
#endif
};

}  // namespace

const Kernels* portable_kernels() {
  static const Kernels kernels = {{run_flops<F32>, run_flops<F32>}, run_read, run_read_pieces};
  return &kernels;
}

}  // namespace pagemill::limits_detail
