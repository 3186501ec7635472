#include <immintrin.h>

#include "attention/attention_kernel.h"

namespace pagemill {
namespace attention_detail {
namespace {

// Sixteen float32 numbers in two AVX2 registers.
struct Ymm {
  struct F {
    __m256 a, b;
  };
  struct W {
    __m256i a, b;
  };
  static constexpr int kMaxRows = 4;
  static constexpr int columns(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

  static PAGEMILL_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static PAGEMILL_INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static PAGEMILL_INLINE F load(const float* x) {
    return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
  }
  static PAGEMILL_INLINE void store(float* to, F x) {
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps(to + 8, x.b);
  }
  static PAGEMILL_INLINE W load_words(const void* x) {
    const __m256i* words = static_cast<const __m256i*>(x);
    return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
  }
  static PAGEMILL_INLINE W load_words_to(const void* x, int lanes) {
    const int* words = static_cast<const int*>(x);
    if (lanes == 16) return load_words(x);
    return {_mm256_maskload_epi32(words, below(lanes)),
            lanes > 8 ? _mm256_maskload_epi32(words + 8, below(lanes - 8)) : _mm256_setzero_si256()};
  }
  static PAGEMILL_INLINE W load_halves(const void* x) {
    const __m128i* halves = static_cast<const __m128i*>(x);
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)),
            _mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1))};
  }
  static PAGEMILL_INLINE W set1_words(uint32_t x) {
    const __m256i words = _mm256_set1_epi32(static_cast<int>(x));
    return {words, words};
  }
  static PAGEMILL_INLINE W and_words(W x, W y) {
    return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
  }
  static PAGEMILL_INLINE F as_floats(W x) {
    return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
  }
  static PAGEMILL_INLINE F low_half(W x) {
    return as_floats({_mm256_slli_epi32(x.a, 16), _mm256_slli_epi32(x.b, 16)});
  }
  static PAGEMILL_INLINE F high_half(W x) { return as_floats(and_words(x, set1_words(0xffff0000u))); }
  // Byte I of each word, as a signed number.
  template <int I>
  static PAGEMILL_INLINE F code(W x) {
    return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x.a, 24 - 8 * I), 24)),
            _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x.b, 24 - 8 * I), 24))};
  }
  static PAGEMILL_INLINE F add(F x, F y) {
    return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
  }
  static PAGEMILL_INLINE F sub(F x, F y) {
    return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
  }
  static PAGEMILL_INLINE F mul(F x, F y) {
    return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
  }
  static PAGEMILL_INLINE F div(F x, F y) {
    return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
  }
  static PAGEMILL_INLINE F fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
  // y where either is NaN.
  static PAGEMILL_INLINE F max(F x, F y) {
    return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
  }
  static PAGEMILL_INLINE F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
  }
  static PAGEMILL_INLINE F copy_sign(F size, F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(size.a, _mm256_and_ps(sign, x.a)),
            _mm256_or_ps(size.b, _mm256_and_ps(sign, x.b))};
  }
  static PAGEMILL_INLINE F if_less(F x, F y, F yes, F no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
  }
  // Lanes [first, last) of x, others of `other`.
  static PAGEMILL_INLINE F keep(F x, int first, int last, F other) {
    const __m256i a = _mm256_andnot_si256(below(first), below(last));
    const __m256i b = _mm256_andnot_si256(below(first - 8), below(last - 8));
    return {_mm256_blendv_ps(other.a, x.a, _mm256_castsi256_ps(a)),
            _mm256_blendv_ps(other.b, x.b, _mm256_castsi256_ps(b))};
  }
  static PAGEMILL_INLINE F round(F x) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, kNearest), _mm256_round_ps(x.b, kNearest)};
  }
  // x times 2^n, n a whole number; 0 where that has no normal number.
  static PAGEMILL_INLINE F scale(F x, F n) { return mul(x, {power(n.a), power(n.b)}); }
  static PAGEMILL_INLINE float reduce_max(F x) {
    return last_four(_mm256_max_ps(x.a, x.b), [](__m128 p, __m128 q) { return _mm_max_ps(p, q); });
  }
  static PAGEMILL_INLINE float reduce_add(F x) {
    return last_four(_mm256_add_ps(x.a, x.b), [](__m128 p, __m128 q) { return _mm_add_ps(p, q); });
  }

 private:
  static PAGEMILL_INLINE __m256i below(int lanes) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static PAGEMILL_INLINE __m256 power(__m256 n) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    exponent = _mm256_max_epi32(exponent, _mm256_setzero_si256());
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }
  template <class Join>
  static PAGEMILL_INLINE float last_four(__m256 x, const Join& join) {
    __m128 four = join(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = join(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(join(four, _mm_shuffle_ps(four, four, 1)));
  }
};

}  // namespace

const Kernels* avx2_f32() { return kernels<Ymm, Floats>(); }
const Kernels* avx2_bf16() { return kernels<Ymm, WidePairs>(); }
const Kernels* avx2_int8() { return coded_kernels<Ymm, Floats, Quads>(); }

}  // namespace attention_detail
}  // namespace pagemill
