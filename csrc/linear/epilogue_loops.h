// The loops of epilogue.h. Included by the files of instruction sets only; everything is in an unnamed
// namespace, so that no code compiled for one instruction set is shared with another.
#pragma once

#include "common/vec.h"
#include "linear/epilogue.h"
#include "linear/linear.h"

namespace pagemill::linear_detail {
namespace {

// exp(x), within 2 ulp; x below -87.3 gives 0, above 88 a large finite number. Plain arithmetic in one
// fixed order: the bits are the same in vectors and tails.
inline float exp_f32(float x) {
  constexpr float kLog2e = 1.44269504088896341f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float bounded = x < -87.3f ? -87.3f : (x > 88.0f ? 88.0f : x);
  const float n = (bounded * kLog2e + kRound) - kRound;
  const float r = (bounded - n * kLn2High) - n * kLn2Low;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float e = (p * (r * r) + r) + 1.0f;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return x < -87.3f ? 0.0f : (x != x ? x : e * scale);
}

inline float silu(float x) { return x / (1.0f + exp_f32(-x)); }

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline float gelu_tanh(float x) {
  const float u = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
  return x / (1.0f + exp_f32(-2.0f * u));
}

inline float bias_at(const void* bias, int dtype, int i) {
  return dtype == static_cast<int>(Dtype::float32) ? static_cast<const float*>(bias)[i]
                                                   : to_float(static_cast<const bf16*>(bias)[i]);
}

inline void add_bias(float* sums, const void* bias, int dtype, int count) {
  if (bias == nullptr) return;
  if (dtype == static_cast<int>(Dtype::float32)) {
    for (int i = 0; i < count; ++i) sums[i] += static_cast<const float*>(bias)[i];
  } else {
    for (int i = 0; i < count; ++i) sums[i] += to_float(static_cast<const bf16*>(bias)[i]);
  }
}

template <float (*act)(float)>
inline void gate(float* out, const float* sums, int columns) {
  // Tiles come in pairs: 16 gates, then their 16 ups.
  for (int t = 0; t * kTile < columns; ++t) {
    for (int i = 0; i < kTile; ++i)
      out[t * kTile + i] = act(sums[2 * t * kTile + i]) * sums[(2 * t + 1) * kTile + i];
  }
}

inline void finish_block(const Finish& f) {
  const int width = f.tiles * kTile;
  alignas(64) float row[kMaxFinishTiles * kTile], gated[kMaxFinishTiles * kTile];
  for (int i = 0; i < f.rows; ++i) {
    for (int j = 0; j < width; ++j) row[j] = f.c[i * width + j];
    const float* result = row;
    if (f.epilogue == static_cast<int>(Epilogue::none)) {
      add_bias(row, f.bias, f.dtype, f.columns);
    } else {
      if (f.bias != nullptr) {
        for (int j = 0; j < f.columns; ++j) {
          const int at = j / kTile * 2 * kTile + j % kTile;
          row[at] += bias_at(f.bias, f.dtype, j);
          row[at + kTile] += bias_at(f.up_bias, f.dtype, j);
        }
      }
      if (f.epilogue == static_cast<int>(Epilogue::silu_gated)) {
        gate<silu>(gated, row, f.columns);
      } else {
        gate<gelu_tanh>(gated, row, f.columns);
      }
      result = gated;
    }
    char* out = f.out + i * f.out_stride;
    const char* residual = f.residual + i * f.residual_stride;
    if (f.out_dtype == static_cast<int>(Dtype::float32)) {
      float* to = reinterpret_cast<float*>(out);
      const float* add = reinterpret_cast<const float*>(residual);
      if (f.residual == nullptr) {
        for (int j = 0; j < f.columns; ++j) to[j] = result[j];
      } else {
        for (int j = 0; j < f.columns; ++j) to[j] = add[j] + result[j];
      }
    } else {
      bf16* to = reinterpret_cast<bf16*>(out);
      const bf16* add = reinterpret_cast<const bf16*>(residual);
      if (f.residual == nullptr) {
        for (int j = 0; j < f.columns; ++j) to[j] = to_bf16(result[j]);
      } else {
        for (int j = 0; j < f.columns; ++j) to[j] = to_bf16(to_float(add[j]) + result[j]);
      }
    }
  }
}

}  // namespace
}  // namespace pagemill::linear_detail
