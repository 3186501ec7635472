// The portable path: vectors of four floats as the compiler makes them (SSE2, NEON, or scalars).
#include "qlinear/qlinear_micro.h"

#if defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace pagemill::qlinear_detail {
namespace {

typedef float Floats __attribute__((vector_size(16)));

struct V {
  using Vec = Floats;
  static constexpr int kLanes = 4, kMaxRowGroup = 4, kWideRowGroup = 4;
  static constexpr int kDirectRows = 1, kDirectWideRows = 1;
  static constexpr int kGroupsAlone = 1;
  static constexpr int kMostTotals = 4;
  static constexpr bool kPairs = false;
  static constexpr int direct_tiles(int) { return 2; }
  static constexpr int decoded_tiles(bool) { return 1; }
  static PAGEMILL_INLINE Vec zero() { return Vec{0.0f, 0.0f, 0.0f, 0.0f}; }
  static PAGEMILL_INLINE Vec load(const float* p) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  static PAGEMILL_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
  static PAGEMILL_INLINE Vec set1(float x) { return Vec{x, x, x, x}; }
  static PAGEMILL_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__ARM_NEON) && defined(__aarch64__)
    return reinterpret_cast<Vec>(vfmaq_f32(reinterpret_cast<float32x4_t>(c),
                                           reinterpret_cast<float32x4_t>(a),
                                           reinterpret_cast<float32x4_t>(b)));
#else
    return a * b + c;
#endif
  }
  static PAGEMILL_INLINE Of<4>::Words and_xor(Of<4>::Words w, uint32_t mask, uint32_t flip) {
    return (w & mask) ^ flip;
  }
  static PAGEMILL_INLINE Vec half(const uint16_t* p) { return Of<4>::half(p); }
  struct Nibbles {
    Of<4>::Words even, odd;  // the values of the even and odd nibbles, as bytes in their place
  };
  static PAGEMILL_INLINE Of<4>::Words look(Of<4>::Words w, const int8_t* table) {
    uint8_t bytes[16];
    __builtin_memcpy(bytes, &w, sizeof bytes);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(table[byte & 15]);
    __builtin_memcpy(&w, bytes, sizeof bytes);
    return w;
  }
  static PAGEMILL_INLINE Nibbles nibbles(Of<4>::Words line, const QMatrix& m) {
    return {look(line, m.bytes), look(line >> 4, m.bytes)};
  }
  static PAGEMILL_INLINE Vec value(const Nibbles& n, int i) {
    return Of<4>::int8_value<V>(i % 2 == 0 ? n.even : n.odd, i / 2);
  }
};

}  // namespace

const Kernels* portable_kernels() { return make_kernels<V>(); }

}  // namespace pagemill::qlinear_detail
