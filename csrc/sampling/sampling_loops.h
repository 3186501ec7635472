// The loops of sampling, compiled once an instruction set. Included by sampling_<isa>.cpp only;
// everything is in an unnamed namespace.
#pragma once

#include "common/lane_math.h"
#include "sampling/sampling_kernels.h"

namespace pagemill::sampling_detail {
namespace {

typedef double WideLanes __attribute__((vector_size(128)));

constexpr float kLowest = -__builtin_inff();

PAGEMILL_LANES_INLINE int64_t less(int64_t a, int64_t b) { return a < b ? a : b; }

PAGEMILL_LANES_INLINE Lanes load_or(const float* p, int64_t count, float fill) {
  if (count >= kLanes) return load(p);
  float room[kLanes];
  for (int i = 0; i < kLanes; ++i) room[i] = i < count ? p[i] : fill;
  return load(room);
}

PAGEMILL_LANES_INLINE double sum_wide(WideLanes v) {
  double lane[kLanes];
  std::memcpy(lane, &v, sizeof v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

bool block_maxima(const float* row, int64_t size, float* maxima) {
  LaneInts broken = {};
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t end = less(start + kBlock, size);
    Lanes most[4];
    for (Lanes& part : most) part = lanes_of(kLowest);
    int64_t i = start;
    for (; i + 4 * kLanes <= end; i += 4 * kLanes)
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) {
        const Lanes v = load(row + i + u * kLanes);
        most[u] = v > most[u] ? v : most[u];
        broken |= v != v;
      }
    for (; i < end; i += kLanes) {
      const Lanes v = load_or(row + i, end - i, kLowest);
      most[0] = v > most[0] ? v : most[0];
      broken |= v != v;
    }
    const Lanes low = most[0] > most[1] ? most[0] : most[1];
    const Lanes high = most[2] > most[3] ? most[2] : most[3];
    float lane[kLanes];
    store(lane, low > high ? low : high);
    float highest = lane[0];
    for (int i = 1; i < kLanes; ++i) highest = lane[i] > highest ? lane[i] : highest;
    maxima[start / kBlock] = highest;
  }
  int any = 0;
  for (int i = 0; i < kLanes; ++i) any |= broken[i];
  return any != 0;
}

void weigh(const float* row, int64_t size, float highest, float divisor, float* weights) {
  for_lanes(size, [&](int64_t, const auto& get, const auto& put) {
    put(weights, exp_lanes((get(row) - highest) / divisor));
  });
}

void block_sums(const float* weights, int64_t size, float level, int64_t last, double* sums) {
  const LaneInts index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Lanes border = lanes_of(level);
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t end = less(start + kBlock, size);
    WideLanes sum = {};
    for (int64_t i = start; i < end; i += kLanes) {
      const Lanes v = load_or(weights + i, end - i, 0.0f);
      const int32_t reach = static_cast<int32_t>(last - i);
      const LaneInts kept = (v > border) | ((v == border) & (index <= reach));
      sum += __builtin_convertvector(select(kept, v, Lanes{}), WideLanes);
    }
    sums[start / kBlock] = sum_wide(sum);
  }
}

double exp_sum(const float* row, int64_t size, float highest) {
  double total = 0.0;
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t end = less(start + kBlock, size);
    WideLanes sum = {};
    for (int64_t i = start; i < end; i += kLanes)
      sum += __builtin_convertvector(exp_lanes(load_or(row + i, end - i, kLowest) - highest),
                                     WideLanes);
    total += sum_wide(sum);
  }
  return total;
}

int64_t count_over(const float* row, int64_t size, float value) {
  LaneInts counts = {};
  const Lanes border = lanes_of(value);
  for (int64_t i = 0; i < size; i += kLanes)
    counts -= load_or(row + i, size - i, kLowest) > border;  // a true lane is -1
  int64_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += counts[i];
  return total;
}

constexpr Kernels kKernels = {block_maxima, weigh, block_sums, exp_sum, count_over};

}  // namespace
}  // namespace pagemill::sampling_detail
