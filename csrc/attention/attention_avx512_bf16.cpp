#include "attention/attention_zmm.h"

namespace pagemill {
namespace attention_detail {
namespace {

struct ZmmBf16 : Zmm {
  // sum + a0 * b0 + a1 * b1 for the pairs of bfloat16 numbers in each word.
  static PAGEMILL_INLINE F dot(F sum, W a, W b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  // Pairs of numbers that bfloat16 holds exactly.
  static PAGEMILL_INLINE W pack_halves(F even, F odd) {
    return _mm512_mask_blend_epi16(0x55555555u, _mm512_castps_si512(odd),
                                   _mm512_srli_epi32(_mm512_castps_si512(even), 16));
  }
  static PAGEMILL_INLINE void store_words(void* to, W x) { _mm512_storeu_si512(to, x); }
  // Store 16 numbers rounded to bfloat16 and return them.
  static PAGEMILL_INLINE F store_bf16(bf16* to, F x) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded);
    return low_half(_mm512_cvtepu16_epi32(rounded));
  }
};

}  // namespace

const Kernels* avx512_bf16_pairs() { return kernels<ZmmBf16, DotPairs>(); }
const Kernels* avx512_int8_pairs() { return coded_kernels<ZmmBf16, DotPairs, DotQuads>(); }

}  // namespace attention_detail
}  // namespace pagemill
