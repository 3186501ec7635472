// The loops of epilogue.h, sixteen outputs at a time. Included by the files of instruction sets only;
// everything is in an unnamed namespace, so that no code compiled for one instruction set is shared with
// another.
#pragma once

#include "common/lane_math.h"
#include "linear/epilogue.h"
#include "linear/linear.h"

namespace pagemill::linear_detail {
namespace {

static_assert(kTile == kLanes);

// What a gated output's first sum becomes before it is multiplied with the second.
struct Ungated {
  static constexpr bool kGated = false;
};

struct SiluGate {
  static constexpr bool kGated = true;
  PAGEMILL_LANES_INLINE static Lanes of(Lanes x) { return x / (1.0f + exp_lanes(-x)); }
};

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanhGate {
  static constexpr bool kGated = true;
  PAGEMILL_LANES_INLINE static Lanes of(Lanes x) {
    const Lanes u = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
    return x / (1.0f + exp_lanes(-2.0f * u));
  }
};

template <class In, class Out, class Gate>
inline void finish_rows(const Finish& f) {
  // Tiles come in pairs where there is a gate: 16 gates, then their 16 ups.
  constexpr int kSums = Gate::kGated ? 2 : 1;
  const In* bias = static_cast<const In*>(f.bias);
  const In* up_bias = static_cast<const In*>(f.up_bias);
  for (int i = 0; i < f.rows; ++i) {
    const float* c = f.c + i * f.tiles * kTile;
    Out* out = reinterpret_cast<Out*>(f.out + i * f.out_stride);
    const Out* residual = nullptr;
    if (f.residual != nullptr)
      residual = reinterpret_cast<const Out*>(f.residual + i * f.residual_stride);
    for_lanes(f.columns, [&](int64_t j, const auto& get, const auto& put) {
      const float* sums = c + j * kSums;
      Lanes v = load(sums);
      if (bias != nullptr) v = v + get(bias);
      if constexpr (Gate::kGated) {
        Lanes up = load(sums + kTile);
        if (bias != nullptr) up = up + get(up_bias);
        v = Gate::of(v) * up;
      }
      if (residual != nullptr) v = get(residual) + v;
      put(out, v);
    });
  }
}

template <class In, class Out>
inline void finish_as(const Finish& f) {
  if (f.epilogue == static_cast<int>(Epilogue::silu_gated)) {
    finish_rows<In, Out, SiluGate>(f);
  } else if (f.epilogue == static_cast<int>(Epilogue::gelu_tanh_gated)) {
    finish_rows<In, Out, GeluTanhGate>(f);
  } else {
    finish_rows<In, Out, Ungated>(f);
  }
}

inline void finish_block(const Finish& f) {
  const bool wide_in = f.dtype == static_cast<int>(Dtype::float32);
  const bool wide_out = f.out_dtype == static_cast<int>(Dtype::float32);
  if (wide_in) {
    wide_out ? finish_as<float, float>(f) : finish_as<float, bf16>(f);
  } else {
    wide_out ? finish_as<bf16, float>(f) : finish_as<bf16, bf16>(f);
  }
}

}  // namespace
}  // namespace pagemill::linear_detail
