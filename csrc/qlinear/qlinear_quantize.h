// The search for 4-bit codes and a scale of a group of numbers. Included by qlinear_micro.h: compiled once
// an instruction set, the same bits in all (sums have sixteen lanes whatever a vector's length).
#pragma once

#include "qlinear/qlinear_kernels.h"

namespace pagemill::qlinear_detail {
namespace {

template <class V>
struct Search {
  using F = typename Of<V::kLanes>::Floats;
  static constexpr int kVecs = kQuantized / V::kLanes, kSums = 16 / V::kLanes;

  struct Sums {
    float xq, qq;
  };

  static PAGEMILL_INLINE F load(const float* p) {
    F v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }

  static PAGEMILL_INLINE float total(const F (&lanes)[kSums]) {
    float s[16];
    __builtin_memcpy(s, lanes, sizeof s);
    for (int width = 8; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) s[i] += s[i + width];
    return s[0];
  }

  // The nearest values of the table to x * inverse, as sums with x.
  static PAGEMILL_INLINE Sums nearest(const QuantTable& table, const F (&x)[kVecs], float inverse) {
    const F zero = {};
    F xq[kSums] = {}, qq[kSums] = {};
    for (int j = 0; j < kVecs; ++j) {
      const F y = x[j] * inverse;
      F q = zero + table.values[0];
#pragma GCC unroll 15
      for (int i = 0; i < 15; ++i) q = q + ((y > zero + table.middles[i]) ? zero + table.steps[i] : zero);
      xq[j % kSums] += x[j] * q;
      qq[j % kSums] += q * q;
    }
    return {total(xq), total(qq)};
  }
};

// Scale and codes of the least squared error among a few sizes of the scale, with the largest number near
// either end of the table; each scale is then the best one for its codes.
template <class V>
void quantize_group(const QuantTable& table, const float* numbers, float* scale, uint8_t* codes) {
  using S = Search<V>;
  typename S::F x[S::kVecs];
  float largest = 0.0f;
  for (int i = 0; i < kQuantized; ++i) {
    const float size = largest < 0.0f ? -largest : largest;
    const float own = numbers[i] < 0.0f ? -numbers[i] : numbers[i];
    if (own > size || own != own) largest = numbers[i];
  }
  for (int j = 0; j < S::kVecs; ++j) x[j] = S::load(numbers + j * V::kLanes);
  constexpr float kSizes[] = {0.82f, 0.86f, 0.9f, 0.94f, 0.97f, 1.0f, 1.04f, 1.08f};
  float best = -1.0f, chosen = 0.0f;
  for (int end = 0; end < 16 && largest != 0.0f; end += 15) {
    for (const float size : kSizes) {
      const float inverse = table.values[end] * size / largest;
      const auto sums = S::nearest(table, x, inverse);
      // What the best scale takes off the squared error.
      const float gain = sums.qq > 0.0f ? sums.xq * sums.xq / sums.qq : 0.0f;
      if (gain > best) {
        best = gain;
        chosen = inverse;
      }
    }
  }
  const auto sums = S::nearest(table, x, chosen);
  *scale = chosen == 0.0f || sums.qq == 0.0f ? largest : sums.xq / sums.qq;
  if (chosen == 0.0f && largest == largest) *scale = 0.0f;
  for (int i = 0; i < kQuantized; ++i) {
    const float y = numbers[i] * chosen;
    int code = 0;
    for (int t = 0; t < 15; ++t) code += y > table.middles[t] ? 1 : 0;
    codes[i] = static_cast<uint8_t>(code);
  }
}

}  // namespace
}  // namespace pagemill::qlinear_detail
