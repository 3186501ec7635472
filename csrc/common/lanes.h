// Sixteen floats as one value, for loops that are written once and compiled once an instruction set:
// the compiler splits a value into whatever vectors the file's flags allow. Nothing is fused or
// reordered, so the bits are the same on every path.
//
// Everything here has internal linkage: the files of different instruction sets must not share code
// that was compiled for one of them.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/vec.h"

namespace pagemill {
namespace {

#define PAGEMILL_LANES_INLINE inline __attribute__((always_inline))

constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(64)));
typedef uint32_t LaneWords __attribute__((vector_size(64)));
typedef int32_t LaneInts __attribute__((vector_size(64)));
typedef uint16_t LaneHalves __attribute__((vector_size(32)));

PAGEMILL_LANES_INLINE Lanes lanes_of(float x) { return Lanes{} + x; }

// mask: all bits of a lane set (a) or none (b), as comparisons give it.
PAGEMILL_LANES_INLINE Lanes select(LaneInts mask, Lanes a, Lanes b) {
#if defined(__AVX512F__)
  return mask ? a : b;  // a masked move; without such, compilers would take lane after lane
#else
  return (Lanes)((mask & (LaneInts)a) | (~mask & (LaneInts)b));
#endif
}

// A bfloat16 number as a float32, which it is the upper half of: to nearest, ties to even; NaNs stay.
PAGEMILL_LANES_INLINE Lanes round_to_bf16(Lanes v) {
  const LaneWords bits = (LaneWords)v;
  const LaneWords even = bits + 0x7fffu + ((bits >> 16) & 1u);
  const Lanes rounded = select(v != v, (Lanes)(bits | 0x400000u), (Lanes)even);
  return (Lanes)((LaneWords)rounded & 0xffff0000u);
}

PAGEMILL_LANES_INLINE LaneWords bf16_bits(Lanes v) { return (LaneWords)round_to_bf16(v) >> 16; }

PAGEMILL_LANES_INLINE Lanes load(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

PAGEMILL_LANES_INLINE Lanes load(const bf16* p) {
  LaneHalves h;
  std::memcpy(&h, p, sizeof h);
  return (Lanes)(__builtin_convertvector(h, LaneWords) << 16);
}

PAGEMILL_LANES_INLINE void store(float* p, Lanes v) { std::memcpy(p, &v, sizeof v); }

PAGEMILL_LANES_INLINE void store(bf16* p, Lanes v) {
  const LaneHalves h = __builtin_convertvector(bf16_bits(v), LaneHalves);
  std::memcpy(p, &h, sizeof h);
}

// The first `count` < 16 numbers at p, and zeros.
template <class T>
PAGEMILL_LANES_INLINE Lanes load_some(const T* p, int64_t count) {
  T room[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) room[i] = p[i];
  return load(room);
}

template <class T>
PAGEMILL_LANES_INLINE void store_some(T* p, Lanes v, int64_t count) {
  T room[kLanes];
  store(room, v);
  for (int64_t i = 0; i < count; ++i) p[i] = room[i];
}

// v as type T holds it.
template <class T>
PAGEMILL_LANES_INLINE Lanes rounded(Lanes v) {
  return sizeof(T) == 2 ? round_to_bf16(v) : v;
}

// Call body(i, load, store) for 0, 16, 32, ... below count: `load(p)` and `store(p, v)` take the 16
// numbers at p + i, or what is left of them.
template <class Body>
PAGEMILL_LANES_INLINE void for_lanes(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    body(
        i, [i](const auto* p) { return load(p + i); },
        [i](auto* p, Lanes v) { store(p + i, v); });
  const int64_t rest = count - i;
  if (rest > 0)
    body(
        i, [i, rest](const auto* p) { return load_some(p + i, rest); },
        [i, rest](auto* p, Lanes v) { store_some(p + i, v, rest); });
}

// The sum of 16 lanes, halves first.
PAGEMILL_LANES_INLINE float sum_lanes(Lanes v) {
  float lane[kLanes];
  store(lane, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

// Sums of many terms: four running sums that take sixteen terms in turn.
struct LaneSum {
  Lanes part[4] = {};
  float total() const { return sum_lanes((part[0] + part[1]) + (part[2] + part[3])); }
};

// The sum over 0..count of term(i, load), called as in for_lanes; it gives zeros past the end.
template <class Term>
PAGEMILL_LANES_INLINE float sum_over(int64_t count, const Term& term) {
  LaneSum sum;
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes)
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      const int64_t at = i + u * kLanes;
      sum.part[u] += term(kLanes, [at](const auto* p) { return load(p + at); });
    }
  for (int u = 0; i < count; ++u, i += kLanes) {
    const int64_t rest = count - i < kLanes ? count - i : kLanes;
    sum.part[u] += term(rest, [i, rest](const auto* p) {
      return rest == kLanes ? load(p + i) : load_some(p + i, rest);
    });
  }
  return sum.total();
}

// Lanes below `count` of v, zeros after.
PAGEMILL_LANES_INLINE Lanes first_lanes(Lanes v, int64_t count) {
  if (count >= kLanes) return v;
  const LaneInts index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return select(index < static_cast<int32_t>(count), v, Lanes{});
}

}  // namespace
}  // namespace pagemill
