#include <immintrin.h>

#include "linear_int8/linear_int8_loops.h"

namespace pagemill::linear_int8_detail {
namespace {

// Bytes become words, which vpmaddwd multiplies without saturating: even and odd bytes apart.
struct V {
  using Sums = __m512i;
  struct Weights {
    __m512i even, odd;
  };
  using Codes = Weights;
  static constexpr int kLanes = 16, kMaxRowGroup = 6, kAloneRows = 8;
  static constexpr int max_tiles(int rows) { return rows <= 3 ? 4 : 2; }
  static constexpr bool kWords = true;
  static Sums zero() { return _mm512_setzero_si512(); }
  static Sums load(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store(int32_t* p, Sums v) { _mm512_storeu_si512(p, v); }
  static Sums add(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
  static Weights weights(const char* p) {
    const __m512i bytes = _mm512_loadu_si512(p);
    return {_mm512_and_si512(bytes, _mm512_set1_epi16(0xff)), _mm512_srli_epi16(bytes, 8)};
  }
  static Codes spread(const char* p) {
    int32_t even, odd;
    std::memcpy(&even, p, sizeof even);
    std::memcpy(&odd, p + 4, sizeof odd);
    return {_mm512_set1_epi32(even), _mm512_set1_epi32(odd)};
  }
  static void keep(Sums& v) { __asm__ volatile("" : "+v"(v)); }
  static Sums dot(Sums sums, const Weights& w, const Codes& x) {
    const __m512i two = _mm512_madd_epi16(w.even, x.even);
    return _mm512_add_epi32(_mm512_add_epi32(sums, two), _mm512_madd_epi16(w.odd, x.odd));
  }
};

}  // namespace

const Kernels* avx512_kernels() { return make_kernels<V>(); }

}  // namespace pagemill::linear_int8_detail
