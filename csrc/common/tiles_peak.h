// Products of tiles with nothing from memory: the limit that benchmarks hold kernels against.
#pragma once

#include <cstdint>

#include "common/tiles.h"

namespace pagemill {
namespace {

struct Bf16Products {
  static constexpr int kDepth = 32;  // k of a tile
  template <int C, int A, int B>
  static inline void dot() {
    Tiles::dot_bf16<C, A, B>();
  }
};

struct ByteProducts {
  static constexpr int kDepth = 64;
  template <int C, int A, int B>
  static inline void dot() {
    Tiles::dot_bytes<C, A, B>();
  }
};

// Returns the operations done, a product and a sum being two. Four sums are under way, as in a block of a
// linear layer: the unit starts one product every 16 cycles and ends it 52 cycles later.
template <class Products>
double run_tile_products(int64_t rounds) {
  Tiles::configure(full_tiles());
  Tiles::zero<0>();
  Tiles::zero<1>();
  Tiles::zero<2>();
  Tiles::zero<3>();
  Tiles::zero<4>();
  Tiles::zero<5>();
  Tiles::zero<6>();
  Tiles::zero<7>();
  for (int64_t round = 0; round < rounds; ++round) {
    Products::template dot<0, 4, 6>();
    Products::template dot<1, 4, 7>();
    Products::template dot<2, 5, 6>();
    Products::template dot<3, 5, 7>();
  }
  Tiles::release();
  return static_cast<double>(rounds) * 4 * 2 * 16 * 16 * Products::kDepth;
}

}  // namespace
}  // namespace pagemill
