#include <immintrin.h>

#include "qlinear/qlinear_micro.h"

namespace pagemill::qlinear_detail {
namespace {

// 16 registers: up to 12 sums, 2 of weights, one of activations.
struct V {
  using Vec = __m256;
  static constexpr int kLanes = 8, kMaxRowGroup = 6, kWideRowGroup = 6;
  static constexpr int kDirectRows = 1, kDirectWideRows = 1;
  static constexpr int kGroupsAlone = 1;
  static constexpr int kMostTotals = 4;
  static constexpr bool kPairs = false;
  static constexpr int direct_tiles(int) { return 2; }
  static constexpr int decoded_tiles(bool) { return 1; }
  static PAGEMILL_INLINE Vec zero() { return _mm256_setzero_ps(); }
  static PAGEMILL_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static PAGEMILL_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  static PAGEMILL_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
  static PAGEMILL_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static PAGEMILL_INLINE Of<8>::Words and_xor(Of<8>::Words w, uint32_t mask, uint32_t flip) {
    return (w & mask) ^ flip;
  }
  static PAGEMILL_INLINE Vec half(const uint16_t* p) {
    return reinterpret_cast<Vec>(Of<8>::half(p));
  }
  // The values of the even and odd nibbles, as bytes in their place.
  struct Nibbles {
    Of<8>::Words even, odd;
  };
  static PAGEMILL_INLINE Nibbles nibbles(Of<8>::Words line, const QMatrix& m) {
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(m.bytes)));
    const auto look = [&](Of<8>::Words w) {
      const __m256i index = reinterpret_cast<__m256i>(w & 0x0f0f0f0fu);
      return reinterpret_cast<Of<8>::Words>(_mm256_shuffle_epi8(table, index));
    };
    return {look(line), look(line >> 4)};
  }
  static PAGEMILL_INLINE Vec value(const Nibbles& n, int i) {
    return reinterpret_cast<Vec>(Of<8>::int8_value<V>(i % 2 == 0 ? n.even : n.odd, i / 2));
  }
};

}  // namespace

const Kernels* avx2_kernels() { return make_kernels<V>(); }

}  // namespace pagemill::qlinear_detail
