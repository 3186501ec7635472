// The loops of `limits`, over a vector type V: Vec, kLanes, kSums (independent sums, enough to fill the
// units), kFlops (operations a lane of one step), step(sum, x): the multiplication; f32 steps have
// kFlops 2.
#pragma once

#include "limits/limits_kernels.h"

namespace pagemill::limits_detail {
namespace {

template <class V>
double run_flops(int64_t rounds) {
  typename V::Vec sums[V::kSums];
  const typename V::Vec x = V::start(rounds);
#pragma GCC unroll 32
  for (int i = 0; i < V::kSums; ++i) sums[i] = V::start(i);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < V::kSums; ++i) {
      sums[i] = V::step(sums[i], x);
      // Each stays what it is: no two may become one.
      V::keep(sums[i]);
    }
  }
  return static_cast<double>(rounds) * V::kSums * V::kLanes * V::kFlops;
}

inline uint64_t run_read(const char* from, int64_t bytes) {
  typedef uint64_t Words __attribute__((vector_size(64), aligned(8)));
  Words sums[4] = {};
  int64_t at = 0;
  for (; at + 256 <= bytes; at += 256) {
    __builtin_prefetch(from + at + 4096);
    __builtin_prefetch(from + at + 4160);
    __builtin_prefetch(from + at + 4224);
    __builtin_prefetch(from + at + 4288);
    for (int i = 0; i < 4; ++i) sums[i] += *reinterpret_cast<const Words*>(from + at + i * 64);
  }
  uint64_t total = 0;
  for (const Words& sum : sums)
    for (int lane = 0; lane < 8; ++lane) total += sum[lane];
  return total;
}

}  // namespace
}  // namespace pagemill::limits_detail
