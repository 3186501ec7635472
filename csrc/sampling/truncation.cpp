#include "sampling/truncation.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>

namespace pagemill::sampling_detail {
namespace {

constexpr int64_t kFirstLook = 1024;  // at most so many tokens have a share of 1 / 1024 or more
constexpr float kTiny = std::numeric_limits<float>::min();

// Sorts by falling number, ties by rising id; -0 and 0 are equal.
uint64_t key_of(float x, int64_t id) {
  uint32_t bits;
  const float plain = x + 0.0f;
  std::memcpy(&bits, &plain, sizeof bits);
  const uint32_t rising = bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
  return (static_cast<uint64_t>(~rising) << 32) | static_cast<uint64_t>(id);
}

int64_t id_of(uint64_t key) { return static_cast<int64_t>(key & 0xffffffffu); }

// room.keys: the entries >= level, sorted.
void rank_at_least(const float* row, int64_t size, const std::vector<float>& maxima, float level,
                   std::vector<uint64_t>& keys) {
  keys.clear();
  for (int64_t block = 0; block * kBlock < size; ++block) {
    if (!(maxima[static_cast<size_t>(block)] >= level)) continue;
    const int64_t end = std::min(size, (block + 1) * kBlock);
    for (int64_t i = block * kBlock; i < end; ++i)
      if (row[i] >= level) keys.push_back(key_of(row[i], i));
  }
  std::sort(keys.begin(), keys.end());
}

// A level that at least k <= size entries reach, and hardly more where that comes cheap.
float kth_level(const float* row, int64_t size, const std::vector<float>& maxima, int64_t k,
                std::vector<float>& copy) {
  const int64_t blocks = (size + kBlock - 1) / kBlock;
  if (k <= blocks)
    copy.assign(maxima.begin(), maxima.begin() + blocks);
  else
    copy.assign(row, row + size);
  std::nth_element(copy.begin(), copy.begin() + (k - 1), copy.end(), std::greater<float>());
  return copy[static_cast<size_t>(k - 1)];
}

// How many of the ranked keys it takes for their weight to reach the goal; 0: they do not.
int64_t head(const std::vector<uint64_t>& keys, int64_t count, const float* weights, double goal) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    sum += static_cast<double>(weights[id_of(keys[static_cast<size_t>(i)])]);
    if (sum >= goal) return i + 1;
  }
  return 0;
}

Cut cut_after(const std::vector<uint64_t>& keys, int64_t count, const float* weights) {
  const int64_t id = id_of(keys[static_cast<size_t>(count - 1)]);
  return {weights[id], id};
}

uint32_t bin_of(float weight) {
  uint32_t bits;
  std::memcpy(&bits, &weight, sizeof bits);
  return bits >> 16;
}

// top_p over the whole row, sorting only the tokens next to the border: the upper 16 bits of a positive
// float rise with it; whole bins are taken from the top until the goal lies in one.
Cut wide_head(Room& room, int64_t vocab, double goal, float floor) {
  const float* weights = room.weights.data();
  room.bins.assign(bin_of(1.0f) + 1, 0.0);
  for (int64_t i = 0; i < vocab; ++i)
    if (weights[i] >= floor) room.bins[bin_of(weights[i])] += static_cast<double>(weights[i]);
  double before = 0.0;
  int64_t bin = static_cast<int64_t>(room.bins.size()) - 1;
  for (; bin >= 0 && before + room.bins[static_cast<size_t>(bin)] < goal; --bin)
    before += room.bins[static_cast<size_t>(bin)];
  // top_p may be so close to 1 that rounding keeps the sum below the goal.
  if (bin < 0) return {floor, vocab};
  room.keys.clear();
  for (int64_t i = 0; i < vocab; ++i)
    if (weights[i] >= floor && bin_of(weights[i]) == bin)
      room.keys.push_back(key_of(weights[i], i));
  std::sort(room.keys.begin(), room.keys.end());
  const int64_t all = static_cast<int64_t>(room.keys.size());
  const int64_t count = head(room.keys, all, weights, goal - before);
  return cut_after(room.keys, count > 0 ? count : all, weights);
}

}  // namespace

Cut truncate(const Kernels& kernels, Room& room, int64_t vocab, double total, const Spec& spec) {
  const int64_t top_k = spec.top_k > 0 && spec.top_k < vocab ? spec.top_k : 0;
  const float min_p = static_cast<float>(spec.min_p);
  const float floor = spec.min_p > 0.0 ? min_p : kTiny;
  if (top_k == 0 && spec.top_p >= 1.0) return {spec.min_p > 0.0 ? min_p : -1.0f, vocab};
  const float* weights = room.weights.data();
  if (spec.min_p > 0.0 && top_k == 0) {
    kernels.block_sums(weights, vocab, floor, vocab, room.sums.data());
    total = 0.0;
    for (double sum : room.sums) total += sum;
  }
  const float share = static_cast<float>(total / kFirstLook);
  rank_at_least(weights, vocab, room.maxima, std::max(share, floor), room.keys);
  if (top_k == 0) {
    const double goal = spec.top_p * total;
    const int64_t count = head(room.keys, static_cast<int64_t>(room.keys.size()), weights, goal);
    return count > 0 ? cut_after(room.keys, count, weights) : wide_head(room, vocab, goal, floor);
  }
  if (static_cast<int64_t>(room.keys.size()) < top_k) {
    const float level = kth_level(weights, vocab, room.maxima, top_k, room.copy);
    rank_at_least(weights, vocab, room.maxima, std::max(level, floor), room.keys);
  }
  int64_t count = std::min(top_k, static_cast<int64_t>(room.keys.size()));
  if (spec.top_p < 1.0) {
    double mass = 0.0;
    for (int64_t i = 0; i < count; ++i)
      mass += static_cast<double>(weights[id_of(room.keys[static_cast<size_t>(i)])]);
    const int64_t reached = head(room.keys, count, weights, spec.top_p * mass);
    if (reached > 0) count = reached;
  }
  return cut_after(room.keys, count, weights);
}

void largest(const float* row, int64_t size, const std::vector<float>& maxima, int64_t k, Room& room,
             int64_t* ids) {
  const float level = k < size ? kth_level(row, size, maxima, k, room.copy)
                               : -std::numeric_limits<float>::infinity();
  rank_at_least(row, size, maxima, level, room.keys);
  for (int64_t i = 0; i < k; ++i) ids[i] = id_of(room.keys[static_cast<size_t>(i)]);
}

}  // namespace pagemill::sampling_detail
