#include <immintrin.h>

#include "linear/linear_micro.h"

namespace pagemill::linear_detail {
namespace {

// 16 registers: up to 12 sums, 2 of weights, one of activations. With few rows more tiles at once, so
// that enough sums are under way.
struct V {
  using Vec = __m256;
  static constexpr int kLanes = 8, kFewRows = 6, kGroupRows = 6;
  static constexpr bool kPairs = false;
  static constexpr int max_tiles(int rows) { return rows == 1 ? 4 : rows == 2 ? 3 : rows == 3 ? 2 : 1; }
  static constexpr int tiles_alone(int rows, Dtype) { return max_tiles(rows); }
  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  static Vec set1(float x) { return _mm256_set1_ps(x); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec low(const char* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
  }
  // Two shifts, since a register for a mask is one too many.
  static Vec high(const char* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(raw, 16), 16));
  }
};

}  // namespace

const Kernels* avx2_kernels(Dtype dtype) { return kernels_of<V>(dtype); }

}  // namespace pagemill::linear_detail
