// Which tokens of one row min_p, top_k and top_p keep: a level of weight, and at that level the ids up
// to a last one. Portable; the loops over whole rows are the instruction sets'.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling/sampling_kernels.h"

namespace pagemill::sampling_detail {

// What a thread works with; grows and is kept.
struct Room {
  std::vector<float> weights, maxima, copy;
  std::vector<double> sums, bins;
  std::vector<uint64_t> keys;
};

struct Spec {
  double temperature, top_p, min_p;
  int64_t top_k;
};

// Kept: weight > level, or weight == level and id <= last.
struct Cut {
  float level;
  int64_t last;
};

// Decide by room.weights [vocab], room.maxima [blocks] of the weights, and `total`, the weights' sum.
Cut truncate(const Kernels& kernels, Room& room, int64_t vocab, double total, const Spec& spec);

// The ids of the k largest entries of a row, falling, ties to the lower id; maxima [blocks] are the row's.
void largest(const float* row, int64_t size, const std::vector<float>& maxima, int64_t k, Room& room,
             int64_t* ids);

}  // namespace pagemill::sampling_detail
