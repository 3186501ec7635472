// What both AVX-512 paths share: float32 in vectors of 16. Included by their files only.
#pragma once

#include <immintrin.h>

#include "qlinear/qlinear_micro.h"

namespace pagemill::qlinear_detail {
namespace {

// 32 registers: up to 24 sums, the weights of as many tiles and what they are decoded from, one of
// activations. Decoded pairs of three tiles and a block of k fit the first cache.
struct Wide512 {
  using Vec = __m512;
  static constexpr int kLanes = 16, kMaxRowGroup = 4, kWideRowGroup = 6;
  static constexpr int kMostTotals = 12;
  static constexpr int kDirectRows = 8, kDirectWideRows = 2;
  static constexpr int kGroupsAlone = 2;  // of one row alone: one at a time leaves the units waiting
  static constexpr int direct_tiles(int rows) { return rows <= 6 ? 4 : 3; }
  static constexpr int decoded_tiles(bool pairs) { return pairs ? 3 : 4; }
  static PAGEMILL_INLINE Vec zero() { return _mm512_setzero_ps(); }
  static PAGEMILL_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static PAGEMILL_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static PAGEMILL_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
  static PAGEMILL_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static PAGEMILL_INLINE Of<16>::Words and_xor(Of<16>::Words w, uint32_t mask, uint32_t flip) {
    constexpr int kAndXor = 0x6a;  // (a & b) ^ c
    return reinterpret_cast<Of<16>::Words>(_mm512_ternarylogic_epi32(
        reinterpret_cast<__m512i>(w), _mm512_set1_epi32(static_cast<int>(mask)),
        _mm512_set1_epi32(static_cast<int>(flip)), kAndXor));
  }
  static PAGEMILL_INLINE Vec half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  struct Nibbles {
    Of<16>::Words line;
    Vec table;
  };
  static PAGEMILL_INLINE Nibbles nibbles(Of<16>::Words line, const QMatrix& m) {
    return {line, _mm512_loadu_ps(m.wide)};
  }
  // The permute looks at the lowest four bits of its index.
  static PAGEMILL_INLINE Vec value(const Nibbles& n, int i) {
    const auto index = i == 0 ? n.line : n.line >> (4 * i);
    return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(index), n.table);
  }
};

}  // namespace
}  // namespace pagemill::qlinear_detail
