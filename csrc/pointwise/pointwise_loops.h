// The loops of pointwise.h, compiled once an instruction set. Included by pointwise_<isa>.cpp only;
// everything is in an unnamed namespace.
#pragma once

#include "common/lane_math.h"
#include "pointwise/pointwise_kernels.h"

namespace pagemill::pointwise_detail {
namespace {

struct Gelu {  // x P(X <= x)
  PAGEMILL_LANES_INLINE static Lanes of(Lanes x) {
    return 0.5f * x * (1.0f + erf_lanes(x * 0.70710678118654752f));
  }
};

struct GeluTanh {  // u = sqrt(2 / pi) (x + 0.044715 x^3)
  PAGEMILL_LANES_INLINE static Lanes of(Lanes x) {
    const Lanes u = 0.79788456080286536f * (x + 0.044715f * (x * x * x));
    return 0.5f * x * (1.0f + tanh_lanes(u));
  }
};

struct Silu {
  PAGEMILL_LANES_INLINE static Lanes of(Lanes x) { return x / (1.0f + exp_lanes(-x)); }
};

struct QuickGelu {
  PAGEMILL_LANES_INLINE static Lanes of(Lanes x) { return x / (1.0f + exp_lanes(-1.702f * x)); }
};

struct Relu {  // a NaN stays
  PAGEMILL_LANES_INLINE static Lanes of(Lanes x) { return select(x < Lanes{}, Lanes{}, x); }
};

struct ReluSquared {
  PAGEMILL_LANES_INLINE static Lanes of(Lanes x) {
    const Lanes positive = Relu::of(x);
    return positive * positive;
  }
};

template <class T, class Act>
void activate_run(void* x, int64_t count) {
  T* numbers = static_cast<T*>(x);
  for_lanes(count, [&](int64_t, const auto& get, const auto& put) {
    put(numbers, Act::of(get(static_cast<const T*>(numbers))));
  });
}

template <class T>
void add_run(void* x, const void* y, int64_t count) {
  T* sums = static_cast<T*>(x);
  const T* added = static_cast<const T*>(y);
  for_lanes(count, [&](int64_t, const auto& get, const auto& put) {
    put(sums, get(static_cast<const T*>(sums)) + get(added));
  });
}

#define PAGEMILL_ACTIVATIONS(T)                                                      \
  {activate_run<T, Gelu>,      activate_run<T, GeluTanh>, activate_run<T, Silu>,     \
   activate_run<T, QuickGelu>, activate_run<T, Relu>,     activate_run<T, ReluSquared>}

constexpr Kernels kKernels = {{PAGEMILL_ACTIVATIONS(float), PAGEMILL_ACTIVATIONS(bf16)},
                              {add_run<float>, add_run<bf16>}};

}  // namespace
}  // namespace pagemill::pointwise_detail
