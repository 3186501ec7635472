// The inner loops of `linear`, written once over a vector type V and compiled once an instruction set.
// Included by the linear_<isa>.cpp files only; everything is in an unnamed namespace, so that no code
// compiled for one instruction set is shared with another.
//
// V gives: Vec, kLanes, kFewRows, kGroupRows, max_tiles(rows), tiles_alone(rows, dtype), zero(),
// load(float*), store(float*, Vec), set1(float), fma(a, b, c) = a * b + c, low(p) and high(p): the first
// and second numbers of the bfloat16 pairs at p, as floats. With kPairs: dot(c, a, b) = c + the sum of two
// products a lane, pair(p): a pair spread over all lanes, raw(p).
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
      acc[i][j] =
          block.accumulate ? V::load(block.c + i * block.c_stride + j * V::kLanes) : V::zero();
  const char* b = block.b;
  int64_t k_row = 0;
  const auto run = [&](int64_t end) __attribute__((always_inline)) {
    for (; k_row < end; ++k_row, b += 64) step(acc, b, k_row);
  };
  run(block.ahead_first * 16);
  for (; k_row < block.ahead_last * 16; ++k_row, b += 64) {
    // Into the second cache: the first is full of what is in use.
#pragma GCC unroll 4
    for (int t = 0; t < NT; ++t) __builtin_prefetch(b + t * block.b_stride + block.ahead, 0, 2);
    step(acc, b, k_row);
  }
  run(block.k_tiles * 16);
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < NT * kVecs; ++j)
      V::store(block.c + i * block.c_stride + j * V::kLanes, acc[i][j]);
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
      const Vec x = V::set1(a[k * M + i]);
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
        const auto x = V::pair(a + k * M + i);
#pragma GCC unroll 16
        for (int j = 0; j < NT * kVecs; ++j) acc[i][j] = V::dot(acc[i][j], x, w[j]);
      }
    });
  } else {
    const float* a = reinterpret_cast<const float*>(block.a);
    run_block<V, M, NT>(block, [=](Vec(&acc)[M][NT * kVecs], const char* b, int64_t k) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        // One half after the other: the registers hold no weights of both.
        __asm__ volatile("" ::: "memory");
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
          const Vec x = V::set1(a[(2 * k + half) * M + i]);
#pragma GCC unroll 16
          for (int j = 0; j < NT * kVecs; ++j) acc[i][j] = V::fma(x, w[j], acc[i][j]);
        }
      }
    });
  }
}

// The inner loops of one type of numbers, by rows and tiles.
template <class V, Dtype D>
struct MicroTable {
  static constexpr int kMost = V::kFewRows > V::kGroupRows ? V::kFewRows : V::kGroupRows;
  using Fn = void (*)(const Block&);
  Fn fns[kMost + 1][kMaxTiles + 1] = {};

  constexpr MicroTable() { fill_rows<kMost>(); }

 private:
  template <int M>
  constexpr void fill_rows() {
    fill_tiles<M, V::max_tiles(M)>();
    if constexpr (M > 1) fill_rows<M - 1>();
  }
  template <int M, int NT>
  constexpr void fill_tiles() {
    if constexpr (D == Dtype::float32) {
      fns[M][NT] = micro_f32<V, M, NT>;
    } else {
      fns[M][NT] = micro_bf16<V, M, NT>;
    }
    if constexpr (NT > 1) fill_tiles<M, NT - 1>();
  }
};

template <class V, Dtype D>
void run_micro(const Block& block) {
  static constexpr MicroTable<V, D> kTable;
  kTable.fns[block.rows][block.tiles](block);
}

template <class V, Dtype D>
constexpr Kernels make_kernels() {
  Kernels k{};
  k.few_rows = V::kFewRows;
  k.group_rows = V::kGroupRows;
  k.row_unit = 1;
  for (int m = 1; m <= MicroTable<V, D>::kMost; ++m) {
    k.max_tiles[m] = V::max_tiles(m);
    k.tiles_alone[m] = V::tiles_alone(m, D);
  }
  k.wide = D == Dtype::bfloat16 && !V::kPairs;
  k.cache_bytes = int64_t{2} << 20;
  k.least_chunk_rows = 96;
  k.run = run_micro<V, D>;
  k.finish = finish_block;
  return k;
}

template <class V>
const Kernels* kernels_of(Dtype dtype) {
  static constexpr Kernels kFloats = make_kernels<V, Dtype::float32>();
  static constexpr Kernels kHalves = make_kernels<V, Dtype::bfloat16>();
  return dtype == Dtype::float32 ? &kFloats : &kHalves;
}

}  // namespace
}  // namespace pagemill::linear_detail
