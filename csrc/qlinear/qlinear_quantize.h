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
    F q[kVecs];
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) q[j] = zero + table.values[0];
#pragma GCC unroll 15
    for (int i = 0; i < 15; ++i) {
      const F middle = zero + table.middles[i], step = zero + table.steps[i];
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) q[j] += (x[j] * inverse > middle) ? step : zero;
    }
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) {
      xq[j % kSums] += x[j] * q[j];
      qq[j % kSums] += q[j] * q[j];
    }
    return {total(xq), total(qq)};
  }

  // The number of largest size; NaN where one is not finite.
  static PAGEMILL_INLINE float largest(const F (&x)[kVecs]) {
    F high = x[0], low = x[0], nothing = x[0] * 0.0f;
    for (int j = 1; j < kVecs; ++j) {
      high = (x[j] > high) ? x[j] : high;
      low = (x[j] < low) ? x[j] : low;
      nothing += x[j] * 0.0f;
    }
    float most = high[0], least = low[0], none = nothing[0];
    for (int i = 1; i < V::kLanes; ++i) {
      most = high[i] > most ? high[i] : most;
      least = low[i] < least ? low[i] : least;
      none += nothing[i];
    }
    return (most >= -least ? most : least) + none;
  }
};

// Scale and codes of the least squared error among a few sizes of the scale, with the largest number near
// either end of the table; each scale is then the best one for its codes.
template <class V>
void quantize_group(const QuantTable& table, const float* numbers, float* scale, uint8_t* codes) {
  using S = Search<V>;
  typename S::F x[S::kVecs];
#pragma GCC unroll 8
  for (int j = 0; j < S::kVecs; ++j) x[j] = S::load(numbers + j * V::kLanes);
  const float largest = S::largest(x);
  constexpr float kSizes[] = {0.88f, 0.95f, 1.0f, 1.06f};
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
  // All zeros; or a number that is none, which the scale becomes too.
  *scale = chosen == 0.0f || sums.qq == 0.0f ? largest : sums.xq / sums.qq;
  const typename S::F zero = {};
#pragma GCC unroll 8
  for (int j = 0; j < S::kVecs; ++j) {
    typename S::F code = zero;
#pragma GCC unroll 15
    for (int i = 0; i < 15; ++i)
      code += (x[j] * chosen > zero + table.middles[i]) ? zero + 1.0f : zero;
    for (int i = 0; i < V::kLanes; ++i) codes[j * V::kLanes + i] = static_cast<uint8_t>(code[i]);
  }
}

}  // namespace
}  // namespace pagemill::qlinear_detail
