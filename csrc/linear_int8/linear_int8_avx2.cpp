#include <immintrin.h>

#include "linear_int8/linear_int8_loops.h"

namespace pagemill::linear_int8_detail {
namespace {

// Bytes become words, which vpmaddwd multiplies without saturating (vpmaddubsw would): even and odd
// bytes apart. 16 registers: up to 8 sums, 4 of weights, 2 of activations.
struct V {
  using Sums = __m256i;
  struct Weights {
    __m256i even, odd;
  };
  using Codes = Weights;
  static constexpr int kLanes = 8, kMaxRowGroup = 4, kAloneRows = 4;
  static constexpr int max_tiles(int rows) { return rows == 1 ? 3 : rows == 2 ? 2 : 1; }
  static constexpr bool kWords = true;
  static Sums zero() { return _mm256_setzero_si256(); }
  static Sums load(const int32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static void store(int32_t* p, Sums v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
  }
  static Sums add(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
  static Weights weights(const char* p) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_and_si256(bytes, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(bytes, 8)};
  }
  static Codes spread(const char* p) {
    int32_t even, odd;
    std::memcpy(&even, p, sizeof even);
    std::memcpy(&odd, p + 4, sizeof odd);
    return {_mm256_set1_epi32(even), _mm256_set1_epi32(odd)};
  }
  static void keep(Sums& v) { __asm__ volatile("" : "+x"(v)); }
  static Sums dot(Sums sums, const Weights& w, const Codes& x) {
    const __m256i two = _mm256_madd_epi16(w.even, x.even);
    return _mm256_add_epi32(_mm256_add_epi32(sums, two), _mm256_madd_epi16(w.odd, x.odd));
  }
};

}  // namespace

const Kernels* avx2_kernels() { return make_kernels<V>(); }

}  // namespace pagemill::linear_int8_detail
