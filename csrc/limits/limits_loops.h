// The loops of `limits`, over a vector type V: Vec, kLanes, kSums (independent sums, enough to fill the
// units), kFlops (operations a lane of one step), step(sum, x): the multiplication; f32 steps have
// kFlops 2.
#pragma once

#include <cstring>

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

// Read four streams side by side, two lines of each in turn: together they come faster from memory than
// one, and faster without software prefetches, which get in the way of the processor's own.
inline uint64_t run_read(const char* from, int64_t bytes) {
  typedef uint64_t Words __attribute__((vector_size(64), aligned(8)));
  constexpr int kStreams = 4;
  constexpr int64_t kTurn = 128;
  const int64_t stream = bytes / (kStreams * kTurn) * kTurn;
  Words sums[kStreams] = {};
  for (int64_t at = 0; at < stream; at += kTurn) {
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s) {
      const char* here = from + s * stream + at;
      sums[s] += *reinterpret_cast<const Words*>(here);
      sums[s] += *reinterpret_cast<const Words*>(here + 64);
    }
  }
  uint64_t total = 0;
  for (const Words& sum : sums)
    for (int lane = 0; lane < 8; ++lane) total += sum[lane];
  for (int64_t at = stream * kStreams; at + 8 <= bytes; at += 8) {
    uint64_t word;
    std::memcpy(&word, from + at, sizeof word);
    total += word;
  }
  return total;
}

// Pieces [first, last) of an order, lines of the second next fetched along with each.
inline uint64_t run_read_pieces(const char* from, int64_t bytes, const int64_t* order, int64_t first,
                                int64_t last) {
  typedef uint64_t Words __attribute__((vector_size(64), aligned(8)));
  Words sum = {};
  for (int64_t i = first; i < last; ++i) {
    const char* piece = from + order[i] * bytes;
    const char* ahead = from + order[i + 2 < last ? i + 2 : i] * bytes;
    for (int64_t at = 0; at < bytes; at += 64) {
      __builtin_prefetch(ahead + at, 0, 2);
      sum += *reinterpret_cast<const Words*>(piece + at);
    }
  }
  uint64_t total = 0;
  for (int lane = 0; lane < 8; ++lane) total += sum[lane];
  return total;
}

}  // namespace
}  // namespace pagemill::limits_detail
