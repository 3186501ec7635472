// The path with AMX tiles: bfloat16. float32 runs as with AVX-512.
//
// Two by two tiles of sums, 32 rows and 32 outputs; a tile of weights is 16 pairs of k times 16 outputs,
// which is the packed layout. A sum takes k tile by tile in rising order, and a tile of k is always
// whole, so the order in which the unit adds within one is the same for all rows: the first and second
// numbers of its pairs apart, then both to the sum.
//
// Tiles are configured at the start of a thread's share of a call: whoever computed before, oneDNN
// say, left other shapes. They are released at its end, so that the system does not save 8 KiB of
// registers at each switch of threads that do something else.
#include "common/tiles.h"
#include "linear/epilogue_loops.h"
#include "linear/linear_kernels.h"

namespace pagemill::linear_detail {
namespace {

constexpr int kTileRows = 16;
// Sums of the upper and lower rows, left and right tiles of outputs; activations; weights.
constexpr int kUpLeft = 0, kUpRight = 1, kLowLeft = 2, kLowRight = 3, kUp = 4, kLow = 5, kLeft = 6,
              kRight = 7;

// Up to 16 rows alone have tiles as high as they are many. More come filled up to whole tiles.
void begin(int64_t rows) {
  TileConfig config = full_tiles();
  if (rows < kTileRows) {
    config.rows[kUpLeft] = config.rows[kUpRight] = config.rows[kUp] = static_cast<uint8_t>(rows);
  }
  Tiles::configure(config);
}

void end() { Tiles::release(); }

// Start the sums of one tile.
template <int C>
inline void start(const Block& block, const float* c) {
  if (block.accumulate) {
    Tiles::load<C>(c, block.c_stride * 4);
  } else {
    Tiles::zero<C>();
  }
}

// Lower: rows 16..31 too; Right: a second tile of outputs too.
template <bool Lower, bool Right>
void run_tiles(const Block& block) {
  const int64_t stride = block.c_stride * 4, high = Lower ? kTileRows : block.rows;
  const char* a = block.a;
  const char* low = block.a + block.k_tiles * high * 64;
  const char* b = block.b;
  float* c = block.c;
  float* c_low = block.c + kTileRows * block.c_stride;
  start<kUpLeft>(block, c);
  if constexpr (Right) start<kUpRight>(block, c + kTile);
  if constexpr (Lower) start<kLowLeft>(block, c_low);
  if constexpr (Lower && Right) start<kLowRight>(block, c_low + kTile);
  for (int64_t kt = 0; kt < block.k_tiles; ++kt, a += high * 64, low += high * 64, b += kTileBytes) {
    if (kt >= block.ahead_first && kt < block.ahead_last) {
      for (int r = 0; r < 16; ++r) {
        __builtin_prefetch(b + block.ahead + r * 64, 0, 2);
        if constexpr (Right) __builtin_prefetch(b + block.b_stride + block.ahead + r * 64, 0, 2);
      }
    }
    Tiles::load<kUp>(a, 64);
    Tiles::load<kLeft>(b, 64);
    Tiles::dot_bf16<kUpLeft, kUp, kLeft>();
    if constexpr (Right) {
      Tiles::load<kRight>(b + block.b_stride, 64);
      Tiles::dot_bf16<kUpRight, kUp, kRight>();
    }
    if constexpr (Lower) {
      Tiles::load<kLow>(low, 64);
      Tiles::dot_bf16<kLowLeft, kLow, kLeft>();
    }
    if constexpr (Lower && Right) Tiles::dot_bf16<kLowRight, kLow, kRight>();
  }
  Tiles::store<kUpLeft>(c, stride);
  if constexpr (Right) Tiles::store<kUpRight>(c + kTile, stride);
  if constexpr (Lower) Tiles::store<kLowLeft>(c_low, stride);
  if constexpr (Lower && Right) Tiles::store<kLowRight>(c_low + kTile, stride);
}

void run(const Block& block) {
  if (block.rows > kTileRows) {
    block.tiles == 2 ? run_tiles<true, true>(block) : run_tiles<true, false>(block);
  } else {
    block.tiles == 2 ? run_tiles<false, true>(block) : run_tiles<false, false>(block);
  }
}

constexpr Kernels make_halves() {
  Kernels k{};
  k.few_rows = kTileRows;
  k.group_rows = 2 * kTileRows;
  k.row_unit = kTileRows;
  for (int rows = 1; rows <= kMaxRows; ++rows) k.max_tiles[rows] = k.tiles_alone[rows] = 2;
  // Half of a second cache of 2 MiB: a tile of activations is needed every 32 cycles, far more than
  // comes from further out. A chunk of 256 rows lets weights come from memory at the rate that they
  // are used up.
  k.cache_bytes = int64_t{1} << 20;
  k.least_chunk_rows = 256;
  k.splits_k = true;
  k.begin = begin;
  k.end = end;
  k.run = run;
  k.finish = finish_block;
  return k;
}

}  // namespace

const Kernels* amx_kernels(Dtype dtype) {
  static constexpr Kernels kHalves = make_halves();
  return dtype == Dtype::float32 ? avx512_bf16_kernels(dtype) : &kHalves;
}

}  // namespace pagemill::linear_detail
