// Sixteen float32 numbers in one AVX-512 register. Included by the files of the AVX-512 paths.
#pragma once

#include <immintrin.h>

#include "attention/attention_kernel.h"

namespace pagemill {
namespace attention_detail {
namespace {

struct Zmm {
  using F = __m512;
  using W = __m512i;  // 16 words of a tile
  static constexpr int kMaxRows = 6;
  // Vectors of sums a row in the inner loops: enough chains of additions, few enough registers.
  static constexpr int columns(int rows) { return rows <= 2 ? 8 : 4; }

  static PAGEMILL_INLINE F zero() { return _mm512_setzero_ps(); }
  static PAGEMILL_INLINE F set1(float x) { return _mm512_set1_ps(x); }
  static PAGEMILL_INLINE F load(const float* x) { return _mm512_loadu_ps(x); }
  static PAGEMILL_INLINE void store(float* to, F x) { _mm512_storeu_ps(to, x); }
  static PAGEMILL_INLINE W load_words(const void* x) { return _mm512_loadu_si512(x); }
  static PAGEMILL_INLINE W load_words_to(const void* x, int lanes) {
    return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << lanes) - 1), x);
  }
  // 16 numbers of 16 bits, each the low half of a word.
  static PAGEMILL_INLINE W load_halves(const void* x) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(x)));
  }
  static PAGEMILL_INLINE W set1_words(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static PAGEMILL_INLINE W and_words(W a, W b) { return _mm512_and_si512(a, b); }
  static PAGEMILL_INLINE F as_floats(W x) { return _mm512_castsi512_ps(x); }
  static PAGEMILL_INLINE F low_half(W x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
  static PAGEMILL_INLINE F high_half(W x) {
    return _mm512_castsi512_ps(_mm512_and_si512(x, set1_words(0xffff0000u)));
  }
  // Byte I of each word, as a signed number.
  template <int I>
  static PAGEMILL_INLINE F code(W x) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 24 - 8 * I), 24));
  }
  static PAGEMILL_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  static PAGEMILL_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static PAGEMILL_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static PAGEMILL_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
  static PAGEMILL_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  // b where either is NaN.
  static PAGEMILL_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
  static PAGEMILL_INLINE F abs(F x) { return _mm512_abs_ps(x); }
  static PAGEMILL_INLINE F copy_sign(F size, F sign) {
    const W bit = set1_words(0x80000000u);
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign), _mm512_castps_si512(size), 0xca));
  }
  static PAGEMILL_INLINE F if_less(F a, F b, F yes, F no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
  }
  // Lanes [first, last) of x, others of `other`.
  static PAGEMILL_INLINE F keep(F x, int first, int last, F other) {
    const uint32_t lanes = ((1u << last) - 1) & ~((1u << first) - 1);
    return _mm512_mask_blend_ps(static_cast<__mmask16>(lanes), other, x);
  }
  static PAGEMILL_INLINE F round(F x) { return _mm512_roundscale_ps(x, 8); }
  // x times 2^n, n a whole number.
  static PAGEMILL_INLINE F scale(F x, F n) { return _mm512_scalef_ps(x, n); }
  static PAGEMILL_INLINE float reduce_max(F x) { return _mm512_reduce_max_ps(x); }
  static PAGEMILL_INLINE float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
};

}  // namespace
}  // namespace attention_detail
}  // namespace pagemill
