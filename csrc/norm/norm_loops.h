// The loops of the norms, compiled once an instruction set. Included by norm_<isa>.cpp only; everything
// is in an unnamed namespace.
#pragma once

#include "common/lanes.h"
#include "norm/norm_kernels.h"

namespace pagemill::norm_detail {
namespace {

template <class T>
void rms_norm_rows(const Rows& rows, int64_t first, int64_t last) {
  const int64_t size = rows.size;
  const T* weight = static_cast<const T*>(rows.weight);
  const bool plain = rows.offset == 0.0f;
  for (int64_t row = first; row < last; ++row) {
    const T* x = static_cast<const T*>(rows.x) + row * rows.x_stride;
    const float squares = sum_over(size, [x](int64_t, const auto& get) {
      const Lanes v = get(x);
      return v * v;
    });
    const Lanes scale =
        lanes_of(1.0f / __builtin_sqrtf(squares / static_cast<float>(size) + rows.eps));
    T* out = static_cast<T*>(rows.out) + row * rows.out_stride;
    const T* residual = static_cast<const T*>(rows.residual) + row * rows.residual_stride;
    const bool adds = rows.residual != nullptr;
    for_lanes(size, [&](int64_t, const auto& get, const auto& put) {
      const Lanes normed = get(x) * scale;
      const Lanes w = get(weight);
      const Lanes v = plain ? rounded<T>(normed) * w : normed * (w + rows.offset);
      put(out, adds ? get(residual) + rounded<T>(v) : v);
    });
  }
}

template <class T>
void layer_norm_rows(const Rows& rows, int64_t first, int64_t last) {
  const int64_t size = rows.size;
  const T* weight = static_cast<const T*>(rows.weight);
  const T* bias = static_cast<const T*>(rows.bias);
  for (int64_t row = first; row < last; ++row) {
    const T* x = static_cast<const T*>(rows.x) + row * rows.x_stride;
    const float count = static_cast<float>(size);
    const float mean = sum_over(size, [x](int64_t, const auto& get) { return get(x); }) / count;
    const float squares = sum_over(size, [x, mean](int64_t some, const auto& get) {
      const Lanes d = first_lanes(get(x) - mean, some);
      return d * d;
    });
    const float scale = 1.0f / __builtin_sqrtf(squares / count + rows.eps);
    T* out = static_cast<T*>(rows.out) + row * rows.out_stride;
    for_lanes(size, [&](int64_t, const auto& get, const auto& put) {
      Lanes v = (get(x) - mean) * scale;
      if (weight != nullptr) v = v * get(weight);
      if (bias != nullptr) v = v + get(bias);
      put(out, v);
    });
  }
}

template <class T>
void scale_run(void* x, int64_t count, float factor) {
  T* numbers = static_cast<T*>(x);
  for_lanes(count, [&](int64_t, const auto& get, const auto& put) {
    put(numbers, get(numbers) * factor);
  });
}

constexpr Kernels kKernels = {{rms_norm_rows<float>, rms_norm_rows<bf16>},
                              {layer_norm_rows<float>, layer_norm_rows<bf16>},
                              {scale_run<float>, scale_run<bf16>}};

}  // namespace
}  // namespace pagemill::norm_detail
