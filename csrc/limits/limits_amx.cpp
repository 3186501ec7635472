// The peak of bfloat16 tiles. Numbers and reading are those of the path before.
#include "common/tiles.h"
#include "limits/limits_kernels.h"

namespace pagemill::limits_detail {
namespace {

// Four sums under way, as a block of a linear layer has: the unit starts one product every 16 cycles and
// ends it 52 cycles later.
double run_tiles(int64_t rounds) {
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
    Tiles::dot_bf16<0, 4, 6>();
    Tiles::dot_bf16<1, 4, 7>();
    Tiles::dot_bf16<2, 5, 6>();
    Tiles::dot_bf16<3, 5, 7>();
  }
  Tiles::release();
  return static_cast<double>(rounds) * 4 * 2 * 16 * 16 * 32;
}

}  // namespace

const Kernels* amx_kernels() {
  static const Kernels kernels = {{avx512_bf16_kernels()->flops[0], run_tiles},
                                  avx512_bf16_kernels()->read};
  return &kernels;
}

}  // namespace pagemill::limits_detail
