#include <immintrin.h>

#include "linear/linear_micro.h"

namespace pagemill::linear_detail {
namespace {

// 32 registers: up to 28 sums, the weights of as many tiles, one of activations. Eight rows of three tiles
// need the fewest loads a product; fewer rows take more tiles, so that enough sums are under way.
struct V {
  using Vec = __m512;
  using Raw = __m512bh;
  static constexpr int kLanes = 16, kFewRows = 14, kGroupRows = 8;
  static constexpr bool kPairs = true;
  static constexpr int max_tiles(int rows) { return rows <= 6 ? 4 : rows <= 9 ? 3 : 2; }
  // One stream of weights is read fastest, where there are rows enough for other sums meanwhile.
  static constexpr int tiles_alone(int rows, Dtype dtype) {
    return dtype == Dtype::bfloat16 && rows >= 2 && rows <= 5 ? 1 : max_tiles(rows);
  }
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

const Kernels* avx512_bf16_kernels(Dtype dtype) { return kernels_of<V>(dtype); }

}  // namespace pagemill::linear_detail
