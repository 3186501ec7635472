// Functions of sixteen numbers at once, over a path's vectors V. Internal linkage, as in
// attention_kernel.h.
#pragma once

#include "attention/attention_work.h"

namespace pagemill {
namespace attention_detail {
namespace {

constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 0, to one unit in the last place or two: 2^n times a polynomial of the rest, whose
// coefficients minimize the relative error. Also exact 0 for -infinity; NaN stays NaN.
template <class V>
PAGEMILL_INLINE typename V::F exp2(typename V::F x) {
  using F = typename V::F;
  x = V::max(V::set1(-152.0f), x);
  const F n = V::round(x), r = V::sub(x, n);
  F q = V::set1(0.0013264727f);
  q = V::fma(q, r, V::set1(0.009671513f));
  q = V::fma(q, r, V::set1(0.055507336f));
  q = V::fma(q, r, V::set1(0.24022242f));
  q = V::fma(q, r, V::set1(0.693147f));
  return V::scale(V::fma(q, r, V::set1(1.0f)), n);
}

template <class V>
PAGEMILL_INLINE typename V::F tanh(typename V::F x) {
  using F = typename V::F;
  const F one = V::set1(1.0f), size = V::abs(x);
  const F e = exp2<V>(V::mul(size, V::set1(-2.0f * kLog2E)));
  const F far = V::copy_sign(V::div(V::sub(one, e), V::add(one, e)), x);
  const F z = V::mul(x, x);
  F q = V::set1(-0.005717037f);
  q = V::fma(q, z, V::set1(0.020650579f));
  q = V::fma(q, z, V::set1(-0.053743497f));
  q = V::fma(q, z, V::set1(0.13331491f));
  q = V::fma(q, z, V::set1(-0.33333284f));
  const F near = V::fma(V::mul(q, z), x, x);
  return V::if_less(size, V::set1(0.625f), near, far);
}

}  // namespace
}  // namespace attention_detail
}  // namespace pagemill
