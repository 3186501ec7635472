// The portable path: what every 64-bit x86 and Arm processor has, else plain loops.
#include "linear_int8/linear_int8_loops.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace pagemill::linear_int8_detail {
namespace {

typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef int16_t Shorts __attribute__((vector_size(16)));

struct V {
  using Sums = Ints;
  struct Weights {
    Shorts even, odd;
  };
  using Codes = Weights;
  static constexpr int kLanes = 4, kMaxRowGroup = 2, kAloneRows = 2;
  static constexpr int max_tiles(int) { return 1; }
  static constexpr bool kWords = true;
  static Sums zero() { return Sums{}; }
  static Sums load(const int32_t* p) {
    Sums v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(int32_t* p, Sums v) { std::memcpy(p, &v, sizeof v); }
  static Sums add(Sums a, Sums b) { return a + b; }
  static Weights weights(const char* p) {
    Words bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return {(Shorts)(bytes & 0x00ff00ffu), (Shorts)((bytes >> 8) & 0x00ff00ffu)};
  }
  static Codes spread(const char* p) {
    uint32_t even, odd;
    std::memcpy(&even, p, sizeof even);
    std::memcpy(&odd, p + 4, sizeof odd);
    return {(Shorts)(Words{} + even), (Shorts)(Words{} + odd)};
  }
  static Sums dot(Sums sums, const Weights& w, const Codes& x) {
    return sums + pairs(w.even, x.even) + pairs(w.odd, x.odd);
  }
  static void keep(Sums& v) {
#if defined(__x86_64__)
    __asm__ volatile("" : "+x"(v));
#elif defined(__aarch64__)
    __asm__ volatile("" : "+w"(v));
#else
    __asm__ volatile("" : "+m"(v));
#endif
  }

 private:
  // a[2i] * b[2i] + a[2i + 1] * b[2i + 1].
  static Sums pairs(Shorts a, Shorts b) {
#if defined(__SSE2__)
    return (Sums)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    return (Sums)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
    Sums sums;
    for (int i = 0; i < 4; ++i) sums[i] = a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return sums;
#endif
  }
};

}  // namespace

const Kernels* portable_kernels() { return make_kernels<V>(); }

}  // namespace pagemill::linear_int8_detail
