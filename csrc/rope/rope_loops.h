// The loops of rotate_heads, compiled once an instruction set. Included by rope_<isa>.cpp only;
// everything is in an unnamed namespace.
#pragma once

#include "common/lanes.h"
#include "rope/rope_kernels.h"

namespace pagemill::rope_detail {
namespace {

// Norm one head: the rounded result, as floats, to `to`.
template <class T>
void norm_head(const Heads& heads, const T* x, const T* weight, float* to) {
  const int64_t size = heads.head_dim;
  const float squares = sum_over(size, [x](int64_t, const auto& get) {
    const Lanes v = get(x);
    return v * v;
  });
  const Lanes scale =
      lanes_of(1.0f / __builtin_sqrtf(squares / static_cast<float>(size) + heads.eps));
  const bool plain = heads.offset == 0.0f;
  for_lanes(size, [&](int64_t, const auto& get, const auto& put) {
    const Lanes normed = get(x) * scale;
    const Lanes w = get(weight);
    put(to, rounded<T>(plain ? rounded<T>(normed) * w : normed * (w + heads.offset)));
  });
}

// Turn the pairs (a[i], b[i]); the results are rounded to T.
template <class T>
void turn(float* a, float* b, const T* cos, const T* sin, int64_t half) {
  for_lanes(half, [&](int64_t, const auto& get, const auto& put) {
    const Lanes x = get(a), y = get(b), c = get(cos), s = get(sin);
    put(a, rounded<T>(rounded<T>(x * c) - rounded<T>(y * s)));
    put(b, rounded<T>(rounded<T>(y * c) + rounded<T>(x * s)));
  });
}

template <class T>
void rotate_tokens(const Heads& heads, int64_t first, int64_t last, float* room) {
  const int64_t size = heads.head_dim, half = heads.cos != nullptr ? heads.half : 0;
  float* apart = room + size;
  for (int64_t token = first; token < last; ++token) {
    const T* cos = static_cast<const T*>(heads.cos) + token * half;
    const T* sin = static_cast<const T*>(heads.sin) + token * half;
    T* head = static_cast<T*>(heads.data) + token * heads.token_stride;
    const T* weight = static_cast<const T*>(heads.weight);
    for (int64_t h = 0; h < heads.num_heads; ++h, head += size) {
      // What is not turned stays where it is, unless it is normed.
      const int64_t changed = weight != nullptr ? size : 2 * half;
      if (weight != nullptr) {
        norm_head<T>(heads, head, weight + h * size, room);
      } else {
        for_lanes(changed, [&](int64_t, const auto& get, const auto& put) { put(room, get(head)); });
      }
      if (half > 0 && !heads.interleaved) {
        turn<T>(room, room + half, cos, sin, half);
      } else if (half > 0) {
        for (int64_t i = 0; i < half; ++i) {
          apart[i] = room[2 * i];
          apart[half + i] = room[2 * i + 1];
        }
        turn<T>(apart, apart + half, cos, sin, half);
        for (int64_t i = 0; i < half; ++i) {
          room[2 * i] = apart[i];
          room[2 * i + 1] = apart[half + i];
        }
      }
      for_lanes(changed, [&](int64_t, const auto& get, const auto& put) { put(head, get(room)); });
    }
  }
}

constexpr Kernels kKernels = {{rotate_tokens<float>, rotate_tokens<bf16>}};

}  // namespace
}  // namespace pagemill::rope_detail
