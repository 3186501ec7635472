#include <immintrin.h>

#include "qlinear/qlinear_avx512.h"

namespace pagemill::qlinear_detail {
namespace {

struct V : Wide512 {
  using Raw = __m512bh;
  using Words = Of<16>::Words;
  static constexpr bool kPairs = true;
  static PAGEMILL_INLINE Raw raw(const char* p) {
    return reinterpret_cast<Raw>(_mm512_loadu_si512(p));
  }
  static PAGEMILL_INLINE Raw pair(const uint32_t* p) {
    return reinterpret_cast<Raw>(_mm512_set1_epi32(static_cast<int>(*p)));
  }
  static PAGEMILL_INLINE Vec dot(Vec c, Raw a, Raw b) { return _mm512_dpbf16_ps(c, a, b); }
  // The lowest four bits of every 16-bit word through a table that is there twice: five are looked at.
  static PAGEMILL_INLINE Raw pair_of_nibbles(Words index, Words table) {
    return reinterpret_cast<Raw>(_mm512_permutexvar_epi16(reinterpret_cast<__m512i>(index),
                                                          reinterpret_cast<__m512i>(table)));
  }
  // The low (step 0) or high (1) byte of every 16-bit word. Exponent and mantissa go four places up and the
  // bias becomes 127; the seven numbers below 2^-6 have no exponent and come from a table.
  static PAGEMILL_INLINE Raw pair_of_fp8(Words line, int step) {
    const __m512i w = reinterpret_cast<__m512i>(line);
    const __m512i index = step == 0 ? w : _mm512_srli_epi16(w, 8);
    const __m512i moved = _mm512_and_si512(
        step == 0 ? _mm512_slli_epi16(w, 4) : _mm512_srli_epi16(w, 4), _mm512_set1_epi16(0x07f0));
    const __mmask32 small = _mm512_testn_epi16_mask(moved, _mm512_set1_epi16(0x0780));
    const __m512i normal = _mm512_add_epi16(moved, _mm512_set1_epi16(120 << 7));
    // n * 2^-9 in bfloat16; the index has two bits of a zero exponent above its mantissa.
    const __m512i table = _mm512_castsi128_si512(
        _mm_setr_epi16(0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __m512i sized = _mm512_mask_permutexvar_epi16(normal, small, index, table);
    const __m512i sign = step == 0 ? _mm512_slli_epi16(w, 8) : w;
    const __m512i mask = _mm512_set1_epi16(static_cast<short>(0x8000));
    return reinterpret_cast<Raw>(_mm512_or_si512(sized, _mm512_and_si512(sign, mask)));
  }
};

}  // namespace

const Kernels* avx512_bf16_kernels() { return make_kernels<V>(); }

}  // namespace pagemill::qlinear_detail
