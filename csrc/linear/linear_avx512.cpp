#include <immintrin.h>

#include "linear/linear_micro.h"

namespace pagemill::linear_detail {
namespace {

struct V {
  using Vec = __m512;
  static constexpr int kLanes = 16, kFewRows = 14, kGroupRows = 8;
  static constexpr bool kPairs = false;
  static constexpr int max_tiles(int rows) { return rows <= 6 ? 4 : rows <= 9 ? 3 : 2; }
  // One stream of weights is read fastest; but a sum of float32 takes longer than a line of them.
  static constexpr int tiles_alone(int rows, Dtype dtype) {
    return dtype == Dtype::bfloat16 && rows <= 5 ? 1 : max_tiles(rows);
  }
  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static Vec set1(float x) { return _mm512_set1_ps(x); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec low(const char* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
  }
  static Vec high(const char* p) {
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), mask));
  }
};

}  // namespace

const Kernels* avx512_kernels(Dtype dtype) { return kernels_of<V>(dtype); }

}  // namespace pagemill::linear_detail
