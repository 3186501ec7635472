#include "attention/attention_kernel.h"

namespace pagemill {
namespace attention_detail {
namespace {

// Sixteen float32 numbers as the compiler's own vectors: the path of every machine, Arm too.
struct Portable {
  typedef float F __attribute__((vector_size(64)));
  typedef uint32_t W __attribute__((vector_size(64)));
  typedef int32_t Mask __attribute__((vector_size(64)));
  static constexpr int kMaxRows = 4;
  static constexpr int columns(int) { return 1; }

  static PAGEMILL_INLINE F zero() { return F{}; }
  static PAGEMILL_INLINE F set1(float x) { return F{} + x; }
  static PAGEMILL_INLINE F load(const float* x) { return read<F>(x, sizeof(F)); }
  static PAGEMILL_INLINE void store(float* to, F x) { std::memcpy(to, &x, sizeof x); }
  static PAGEMILL_INLINE W load_words(const void* x) { return read<W>(x, sizeof(W)); }
  static PAGEMILL_INLINE W load_words_to(const void* x, int lanes) {
    return lanes == 16 ? load_words(x) : read<W>(x, static_cast<size_t>(lanes) * 4);
  }
  static PAGEMILL_INLINE W load_halves(const void* x) {
    uint16_t halves[16];
    std::memcpy(halves, x, sizeof halves);
    W words;
    for (int i = 0; i < 16; ++i) words[i] = halves[i];
    return words;
  }
  static PAGEMILL_INLINE W set1_words(uint32_t x) { return W{} + x; }
  static PAGEMILL_INLINE W and_words(W a, W b) { return a & b; }
  static PAGEMILL_INLINE F as_floats(W x) { return (F)x; }
  static PAGEMILL_INLINE F low_half(W x) { return (F)(x << 16); }
  static PAGEMILL_INLINE F high_half(W x) { return (F)(x & 0xffff0000u); }
  // Byte I of each word, as a signed number.
  template <int I>
  static PAGEMILL_INLINE F code(W x) {
    return __builtin_convertvector((Mask)(x << (24 - 8 * I)) >> 24, F);
  }
  static PAGEMILL_INLINE F add(F a, F b) { return a + b; }
  static PAGEMILL_INLINE F sub(F a, F b) { return a - b; }
  static PAGEMILL_INLINE F mul(F a, F b) { return a * b; }
  static PAGEMILL_INLINE F div(F a, F b) { return a / b; }
  // Rounded twice: not every machine has a fused one.
  static PAGEMILL_INLINE F fma(F a, F b, F c) { return a * b + c; }
  // b where either is NaN.
  static PAGEMILL_INLINE F max(F a, F b) { return a > b ? a : b; }
  static PAGEMILL_INLINE F abs(F x) { return (F)((W)x & 0x7fffffffu); }
  static PAGEMILL_INLINE F copy_sign(F size, F sign) {
    return (F)((W)size | ((W)sign & 0x80000000u));
  }
  static PAGEMILL_INLINE F if_less(F a, F b, F yes, F no) { return a < b ? yes : no; }
  // Lanes [first, last) of x, others of `other`.
  static PAGEMILL_INLINE F keep(F x, int first, int last, F other) {
    const Mask lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return ((lane >= first) & (lane < last)) ? x : other;
  }
  // To a whole number: adding kMagic leaves no bits for a fraction.
  static PAGEMILL_INLINE F round(F x) { return (x + kMagic) - kMagic; }
  // x times 2^n, n a whole number; 0 where that has no normal number.
  static PAGEMILL_INLINE F scale(F x, F n) {
    // The integer in the low bits of n + kMagic, without a conversion that NaN may not take.
    Mask exponent = (Mask)(n + kMagic) - (Mask)(F{} + kMagic) + 127;
    exponent = exponent > 0 ? exponent : Mask{};
    exponent = exponent < 254 ? exponent : Mask{} + 254;
    return x * (F)(exponent << 23);
  }
  static PAGEMILL_INLINE float reduce_max(F x) {
    float highest = x[0];
    for (int i = 1; i < 16; ++i) highest = highest > x[i] ? highest : x[i];
    return highest;
  }
  static PAGEMILL_INLINE float reduce_add(F x) {
    float part[8];
    for (int i = 0; i < 8; ++i) part[i] = x[i] + x[i + 8];
    for (int i = 0; i < 4; ++i) part[i] += part[i + 4];
    return (part[0] + part[2]) + (part[1] + part[3]);
  }

 private:
  static constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
  template <class Vector>
  static PAGEMILL_INLINE Vector read(const void* x, size_t bytes) {
    Vector v = {};
    std::memcpy(&v, x, bytes);
    return v;
  }
};

}  // namespace

const Kernels* portable_f32() { return kernels<Portable, Floats>(); }
const Kernels* portable_bf16() { return kernels<Portable, WidePairs>(); }
const Kernels* portable_int8() { return coded_kernels<Portable, Floats, Quads>(); }

}  // namespace attention_detail
}  // namespace pagemill
