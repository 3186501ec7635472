// Exponentials over sixteen floats, in plain arithmetic: the same bits in every lane, tail and
// instruction set. Internal linkage, as in lanes.h.
#pragma once

#include "common/lanes.h"

namespace pagemill {
namespace {

// exp(x) within 2 ulp; below -87.3 it is 0, above 88 a large finite number; NaN stays.
PAGEMILL_LANES_INLINE Lanes exp_lanes(Lanes x) {
  const Lanes low = lanes_of(-87.3f), high = lanes_of(88.0f);
  Lanes bounded = select(x < low, low, x);
  bounded = select(bounded > high, high, bounded);
  const Lanes shift = lanes_of(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Lanes n = (bounded * 1.44269504088896341f + shift) - shift;
  const Lanes r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  Lanes p = lanes_of(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Lanes e = (p * (r * r) + r) + 1.0f;
  // A NaN must not reach the conversion to whole numbers.
  const LaneInts is_nan = x != x;
  const LaneInts whole = __builtin_convertvector(select(is_nan, Lanes{}, n), LaneInts);
  const Lanes scale = (Lanes)((whole + 127) << 23);
  return select(is_nan, x, select(x < low, Lanes{}, e * scale));
}

// tanh(x) within a few ulp: a polynomial near 0, 1 - 2 / (exp(2 |x|) + 1) elsewhere (S. L. Moshier's
// Cephes library).
PAGEMILL_LANES_INLINE Lanes tanh_lanes(Lanes x) {
  const Lanes size = (Lanes)((LaneWords)x & 0x7fffffffu);
  const Lanes z = x * x;
  Lanes p = lanes_of(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  const Lanes near = (p * z) * size + size;
  const Lanes far = 1.0f - 2.0f / (exp_lanes(size + size) + 1.0f);
  const LaneWords sign = (LaneWords)x & 0x80000000u;
  return (Lanes)((LaneWords)select(size < lanes_of(0.625f), near, far) | sign);
}

// A polynomial in x, its coefficients from the highest power down.
template <int kCount>
PAGEMILL_LANES_INLINE Lanes polynomial(Lanes x, const float (&coefficients)[kCount]) {
  Lanes p = lanes_of(coefficients[0]);
  for (int i = 1; i < kCount; ++i) p = p * x + coefficients[i];
  return p;
}

// erf(x) within 2e-7: a polynomial within [-1, 1], 1 - exp(-x^2) q(1 / x^2) / x outside (Cephes, as above).
PAGEMILL_LANES_INLINE Lanes erf_lanes(Lanes x) {
  constexpr float kNear[] = {7.853861353153693e-5f, -8.010193625184903e-4f, 5.188327685732524e-3f,
                             -2.685381193529856e-2f, 1.128358514861418e-1f, -3.761262582423300e-1f,
                             1.128379165726710f};
  constexpr float kMiddle[] = {2.326819970068386e-2f, -1.387039388740657e-1f, 3.687424674597105e-1f,
                               -5.824733027278666e-1f, 6.210004621745983e-1f, -4.944515323274145e-1f,
                               3.404879937665872e-1f, -2.741127028184656e-1f, 5.638259427386472e-1f};
  constexpr float kFar[] = {-1.047766399936249e1f, 1.297719955372516e1f, -7.495518717768503f,
                            2.921019019210786f, -1.015265279202700f, 4.218463358204948e-1f,
                            -2.820767439740514e-1f, 5.641895067754075e-1f};
  const Lanes size = (Lanes)((LaneWords)x & 0x7fffffffu);
  const Lanes near = polynomial(size * size, kNear) * size;
  const Lanes outside = select(size < lanes_of(1.0f), lanes_of(1.0f), size);
  const Lanes inverse = 1.0f / outside, y = inverse * inverse;
  const Lanes q = select(outside < lanes_of(2.0f), polynomial(y, kMiddle), polynomial(y, kFar));
  const Lanes far = 1.0f - exp_lanes(-(outside * outside)) * inverse * q;
  const LaneWords sign = (LaneWords)x & 0x80000000u;
  return (Lanes)((LaneWords)select(size < lanes_of(1.0f), near, far) | sign);
}

}  // namespace
}  // namespace pagemill
