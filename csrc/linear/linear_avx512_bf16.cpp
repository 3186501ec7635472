#include <immintrin.h>

#include "linear/linear_micro.h"

namespace pagemill::linear_detail {
namespace {

// 32 registers: up to 24 sums, 4 of weights, one of activations.
struct V {
  using Vec = __m512;
  using Raw = __m512bh;
  static constexpr int kLanes = 16, kMaxRowGroup = 6;
  static constexpr bool kPairs = true;
  static constexpr int max_tiles(int) { return 4; }
  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static Vec set1(float x) { return _mm512_set1_ps(x); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Raw raw(const char* p) { return reinterpret_cast<Raw>(_mm512_loadu_si512(p)); }
  static Raw pair(const uint32_t* p) {
    return reinterpret_cast<Raw>(_mm512_set1_epi32(static_cast<int>(*p)));
  }
  static Vec dot(Vec c, Raw a, Raw b) { return _mm512_dpbf16_ps(c, a, b); }
};

}  // namespace

const Kernels* avx512_bf16_kernels() { return make_kernels<V>(); }

}  // namespace pagemill::linear_detail
