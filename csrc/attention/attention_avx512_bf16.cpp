#include "attention/attention_zmm.h"

namespace pagemill {
namespace attention_detail {
namespace {

struct ZmmBf16 : Zmm {
  // sum + a0 * b0 + a1 * b1 for the pairs of bfloat16 numbers in each word.
  static PAGEMILL_INLINE F dot(F sum, W a, W b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  // Store 16 numbers rounded to bfloat16 and return them.
  static PAGEMILL_INLINE F store_bf16(bf16* to, F x) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded);
    return low_half(_mm512_cvtepu16_epi32(rounded));
  }
};

}  // namespace

const Kernels* avx512_bf16_pairs() { return kernels<ZmmBf16, DotPairs>(); }

}  // namespace attention_detail
}  // namespace pagemill
