// The inner loops of `linear`, written once over a vector type V and compiled once an instruction set.
// Included by the linear_<isa>.cpp files only; everything is in an unnamed namespace, so that no code
// compiled for one instruction set is shared with another.
//
// V gives: Vec, kLanes, kMaxRowGroup, max_tiles(rows), zero(), load(float*), store(float*, Vec), set1(float), fma(a, b, c) = a * b + c,
// low(p) and high(p): the first and second numbers of the bfloat16 pairs at p, as floats. With kPairs:
// dot(c, a, b) = c + the sum of two products a lane, pair(p): a pair spread over all lanes, raw(p).
#pragma once

#include "linear/epilogue_loops.h"
#include "linear/linear_kernels.h"

namespace pagemill::linear_detail {
namespace {

template <class V, int M, int NT, class Step>
inline __attribute__((always_inline)) void run_block(const Block& block, const Step& step) {
  constexpr int kVecs = kTile / V::kLanes;
  typename V::Vec acc[M][NT * kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < NT * kVecs; ++j)
      acc[i][j] = block.accumulate ? V::load(block.c + i * NT * kTile + j * V::kLanes) : V::zero();
  const char* b = block.b;
  int64_t k_row = 0;
  for (int64_t kt = 0; kt < block.k_tiles; ++kt, b += kTileBytes) {
    // Into the second cache: the first is full of what is in use. Elsewhere the line in use is asked
    // for again, which costs nothing but the instruction.
    const int64_t ahead = kt >= block.ahead_first && kt < block.ahead_last ? block.ahead : 0;
    for (int r = 0; r < 16; ++r, ++k_row) {
#pragma GCC unroll 4
      for (int t = 0; t < NT; ++t) __builtin_prefetch(b + r * 64 + t * block.b_stride + ahead, 0, 2);
      step(acc, b + r * 64, k_row);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < NT * kVecs; ++j)
      V::store(block.c + i * NT * kTile + j * V::kLanes, acc[i][j]);
}

template <class V, int M, int NT>
void micro_f32(const Block& block) {
  constexpr int kVecs = kTile / V::kLanes;
  using Vec = typename V::Vec;
  const float* a = reinterpret_cast<const float*>(block.a);
  const int64_t stride = block.b_stride;
  run_block<V, M, NT>(block, [=](Vec(&acc)[M][NT * kVecs], const char* b, int64_t k) {
    Vec w[NT * kVecs];
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v)
        w[t * kVecs + v] =
            V::load(reinterpret_cast<const float*>(b + t * stride) + v * V::kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const Vec x = V::set1(a[i * (kSlotBytes / 4) + k]);
#pragma GCC unroll 16
      for (int j = 0; j < NT * kVecs; ++j) acc[i][j] = V::fma(x, w[j], acc[i][j]);
    }
  });
}

template <class V, int M, int NT>
void micro_bf16(const Block& block) {
  constexpr int kVecs = kTile / V::kLanes;
  using Vec = typename V::Vec;
  const int64_t stride = block.b_stride;
  if constexpr (V::kPairs) {
    const uint32_t* a = reinterpret_cast<const uint32_t*>(block.a);
    run_block<V, M, NT>(block, [=](Vec(&acc)[M][NT * kVecs], const char* b, int64_t k) {
        typename V::Raw w[NT * kVecs];
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t) w[t] = V::raw(b + t * stride);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const auto x = V::pair(a + i * (kSlotBytes / 4) + k);
#pragma GCC unroll 16
        for (int j = 0; j < NT * kVecs; ++j) acc[i][j] = V::dot(acc[i][j], x, w[j]);
      }
    });
  } else {
    const float* a = reinterpret_cast<const float*>(block.a);
    run_block<V, M, NT>(block, [=](Vec(&acc)[M][NT * kVecs], const char* b, int64_t k) {
  #pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        Vec w[NT * kVecs];
#pragma GCC unroll 16
        for (int t = 0; t < NT; ++t)
#pragma GCC unroll 16
          for (int v = 0; v < kVecs; ++v) {
            const char* p = b + t * stride + v * V::kLanes * 4;
            w[t * kVecs + v] = half == 0 ? V::low(p) : V::high(p);
          }
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
          const Vec x = V::set1(a[i * (kWideSlotBytes / 4) + 2 * k + half]);
#pragma GCC unroll 16
          for (int j = 0; j < NT * kVecs; ++j) acc[i][j] = V::fma(x, w[j], acc[i][j]);
        }
      }
    });
  }
}

// Fill the table's entry for M rows and NT tiles, and all smaller ones.
template <class V, int M, int NT>
void fill_tiles(Kernels& k) {
  k.micro[0][M][NT] = micro_f32<V, M, NT>;
  k.micro[1][M][NT] = micro_bf16<V, M, NT>;
  if constexpr (NT > 1) fill_tiles<V, M, NT - 1>(k);
}

template <class V, int M>
void fill_rows(Kernels& k) {
  constexpr int kTiles = V::max_tiles(M);
  k.max_tiles[M] = kTiles;
  fill_tiles<V, M, kTiles>(k);
  if constexpr (M > 1) fill_rows<V, M - 1>(k);
}

template <class V>
const Kernels* make_kernels() {
  static const Kernels kernels = [] {
    Kernels k{};
    k.max_rows = V::kMaxRowGroup;
    k.pairs = V::kPairs;
    k.finish = finish_block;
    fill_rows<V, V::kMaxRowGroup>(k);
    return k;
  }();
  return &kernels;
}

}  // namespace
}  // namespace pagemill::linear_detail
