// The path with AMX tiles: signed codes of activations times the packed bytes, which are laid out as the unit
// wants them. Sums are whole numbers, so they are those of every other path; codes are made, and sums
// turned into numbers, as with AVX-512.
//
// Many rows: two by two tiles of sums, 32 rows and 32 outputs. Up to 16 rows alone: one row of tiles, up
// to four outputs' side by side, as many streams of weights. Activations are read from their rows, which
// lie an odd number of cache lines apart.
#include "common/tiles_peak.h"
#include "linear_int8/linear_int8_kernels.h"

namespace pagemill::linear_int8_detail {
namespace {

constexpr int kTileRows = 16;
constexpr int kFewTiles = 4;
static_assert(kFewTiles <= kMaxTiles && 2 * kTileRows <= kMaxRows);

// Up to 16 rows alone have tiles as high as they are many: sums 0 to 3, activations 4, weights 5. More come
// filled up to whole tiles.
void begin(int64_t rows) {
  TileConfig config = full_tiles();
  if (rows < kTileRows)
    for (int tile = 0; tile <= 4; ++tile) config.rows[tile] = static_cast<uint8_t>(rows);
  Tiles::configure(config);
}

void end() { Tiles::release(); }

template <int C>
inline void start(const Block& block, const int32_t* c) {
  if (block.accumulate) {
    Tiles::load<C>(c, block.c_stride * 4);
  } else {
    Tiles::zero<C>();
  }
}

inline void ask_ahead(const Block& block, int64_t kt, const char* b, int tiles) {
  if (kt < block.ahead_first || kt >= block.ahead_last) return;
  for (int t = 0; t < tiles; ++t)
    for (int r = 0; r < 16; ++r)
      __builtin_prefetch(b + t * block.b_stride + block.ahead + r * 64, 0, 2);
}

// One row of NT tiles of sums.
template <int NT>
void run_few(const Block& block) {
  const char *a = block.a, *b = block.b;
  start<0>(block, block.c);
  if constexpr (NT > 1) start<1>(block, block.c + kTile);
  if constexpr (NT > 2) start<2>(block, block.c + 2 * kTile);
  if constexpr (NT > 3) start<3>(block, block.c + 3 * kTile);
  for (int64_t kt = 0; kt < block.k_tiles; ++kt, a += kTileDepth, b += kTileBytes) {
    ask_ahead(block, kt, b, NT);
    Tiles::load<4>(a, block.a_stride);
    Tiles::load<5>(b, 64);
    Tiles::dot_bytes<0, 4, 5>();
    if constexpr (NT > 1) {
      Tiles::load<6>(b + block.b_stride, 64);
      Tiles::dot_bytes<1, 4, 6>();
    }
    if constexpr (NT > 2) {
      Tiles::load<7>(b + 2 * block.b_stride, 64);
      Tiles::dot_bytes<2, 4, 7>();
    }
    if constexpr (NT > 3) {
      Tiles::load<5>(b + 3 * block.b_stride, 64);
      Tiles::dot_bytes<3, 4, 5>();
    }
  }
  const int64_t stride = block.c_stride * 4;
  Tiles::store<0>(block.c, stride);
  if constexpr (NT > 1) Tiles::store<1>(block.c + kTile, stride);
  if constexpr (NT > 2) Tiles::store<2>(block.c + 2 * kTile, stride);
  if constexpr (NT > 3) Tiles::store<3>(block.c + 3 * kTile, stride);
}

// Two rows of NT tiles of sums, one or two.
template <int NT>
void run_many(const Block& block) {
  const char *a = block.a, *low = block.a + kTileRows * block.a_stride, *b = block.b;
  int32_t* c_low = block.c + kTileRows * block.c_stride;
  start<0>(block, block.c);
  start<2>(block, c_low);
  if constexpr (NT > 1) {
    start<1>(block, block.c + kTile);
    start<3>(block, c_low + kTile);
  }
  for (int64_t kt = 0; kt < block.k_tiles;
       ++kt, a += kTileDepth, low += kTileDepth, b += kTileBytes) {
    ask_ahead(block, kt, b, NT);
    Tiles::load<4>(a, block.a_stride);
    Tiles::load<6>(b, 64);
    Tiles::dot_bytes<0, 4, 6>();
    Tiles::load<5>(low, block.a_stride);
    Tiles::dot_bytes<2, 5, 6>();
    if constexpr (NT > 1) {
      Tiles::load<7>(b + block.b_stride, 64);
      Tiles::dot_bytes<1, 4, 7>();
      Tiles::dot_bytes<3, 5, 7>();
    }
  }
  const int64_t stride = block.c_stride * 4;
  Tiles::store<0>(block.c, stride);
  Tiles::store<2>(c_low, stride);
  if constexpr (NT > 1) {
    Tiles::store<1>(block.c + kTile, stride);
    Tiles::store<3>(c_low + kTile, stride);
  }
}

Kernels make_kernels() {
  Kernels k = *avx512_vnni_kernels();
  k.max_rows = 2 * kTileRows;
  k.alone_rows = kTileRows;
  k.row_unit = kTileRows;
  // Half of a second cache of 2 MiB: a tile of activations is needed every 32 cycles. A chunk of 256 rows
  // lets weights come from memory at the rate that they are used up.
  k.cache_bytes = int64_t{1} << 20;
  k.least_chunk_rows = 256;
  k.begin = begin;
  k.end = end;
  k.words = false;
  k.peak = run_tile_products<ByteProducts>;
  for (int m = 1; m <= kMaxRows; ++m) {
    const bool many = m > kTileRows;
    k.max_tiles[m] = many ? 2 : kFewTiles;
    k.micro[m][1] = many ? run_many<1> : run_few<1>;
    k.micro[m][2] = many ? run_many<2> : run_few<2>;
    k.micro[m][3] = many ? nullptr : run_few<3>;
    k.micro[m][4] = many ? nullptr : run_few<4>;
  }
  return k;
}

}  // namespace

const Kernels* amx_kernels() {
  static const Kernels kernels = make_kernels();
  return &kernels;
}

}  // namespace pagemill::linear_int8_detail
