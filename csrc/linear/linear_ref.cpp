// The portable path: vectors of four floats as the compiler makes them (SSE2, NEON, or scalars).
#include "linear/linear_micro.h"

#if defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace pagemill::linear_detail {
namespace {

typedef float Floats __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));

struct V {
  using Vec = Floats;
  static constexpr int kLanes = 4, kFewRows = 4, kGroupRows = 4;
  static constexpr bool kPairs = false;
  static constexpr int max_tiles(int rows) { return rows == 1 ? 2 : 1; }
  static constexpr int tiles_alone(int rows, Dtype) { return max_tiles(rows); }
  static Vec zero() { return Vec{0.0f, 0.0f, 0.0f, 0.0f}; }
  static Vec load(const float* p) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
  static Vec set1(float x) { return Vec{x, x, x, x}; }
  static Vec fma(Vec a, Vec b, Vec c) {
#if defined(__ARM_NEON) && defined(__aarch64__)
    return reinterpret_cast<Vec>(vfmaq_f32(reinterpret_cast<float32x4_t>(c),
                                           reinterpret_cast<float32x4_t>(a),
                                           reinterpret_cast<float32x4_t>(b)));
#else
    return a * b + c;
#endif
  }
  static Words words(const char* p) {
    Words w;
    __builtin_memcpy(&w, p, sizeof w);
    return w;
  }
  static Vec low(const char* p) { return reinterpret_cast<Vec>(words(p) << 16); }
  static Vec high(const char* p) { return reinterpret_cast<Vec>(words(p) & 0xffff0000u); }
};

}  // namespace

const Kernels* portable_kernels(Dtype dtype) { return kernels_of<V>(dtype); }

}  // namespace pagemill::linear_detail
