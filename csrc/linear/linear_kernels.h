// What an instruction set offers `linear` for one type of numbers: see linear_micro.h for how the paths
// with vectors are made, linear_amx.cpp for tiles.
#pragma once

#include <cstdint>

#include "common/vec.h"
#include "linear/epilogue.h"

namespace pagemill::linear_detail {

inline constexpr int64_t kTileBytes = 1024;  // 16 rows of 64 bytes
inline constexpr int64_t kTilesOfK = 16;     // of a block of k, at most
inline constexpr int kMaxRows = 32;          // of any path's row group

// One block of sums: c[rows, tiles * 16] = (accumulate ? c : 0) + a @ b.
struct Block {
  int rows, tiles;
  const char* a;      // the row group's activations of this block of k, as the path wants them
  const char* b;      // first tile; k tiles follow one another
  int64_t b_stride;   // bytes from one tile of outputs to the next
  int64_t k_tiles;
  float* c;
  int64_t c_stride;   // numbers from row to row
  bool accumulate;
  // While it works on k tiles ahead_first..ahead_last, the block asks the caches for what lies `ahead`
  // bytes further on: the weights of the next block of k.
  int64_t ahead, ahead_first, ahead_last;
};

struct Kernels {
  // How rows are grouped. Up to few_rows are one group, so that weights, which come from memory then,
  // are read once. More make groups of at most group_rows, which have the most tiles at once. Groups
  // begin at multiples of row_unit, and the last one is filled up to one with zeros (but for a few rows
  // alone).
  int few_rows, group_rows, row_unit;
  // Tiles of outputs that one call of `run` takes, by rows of the group: what is most with many groups,
  // of which smaller ones take as many; and what is best for one group alone, which reads its weights
  // from memory.
  int max_tiles[kMaxRows + 1], tiles_alone[kMaxRows + 1];
  bool wide;  // activations are widened to float32
  // Activations lie in blocks of k, therein row groups. A group is [k][rows] numbers, or [k / 2][rows]
  // pairs of bfloat16 that stay narrow; with a row_unit, [rows / unit][k tiles][unit rows][64 bytes].
  //
  // A chunk has as many rows as fill cache_bytes of the outer caches, but for least_chunk_rows. Where
  // those are more than that, splits_k tells whether k is gone through in parts that do fit.
  int64_t cache_bytes, least_chunk_rows;
  bool splits_k;
  void (*begin)(int64_t rows);  // before a thread's calls for a chunk of so many rows; may be null
  void (*end)();
  void (*run)(const Block&);
  void (*finish)(const Finish&);
};

const Kernels* portable_kernels(Dtype dtype);
const Kernels* avx2_kernels(Dtype dtype);
const Kernels* avx512_kernels(Dtype dtype);
const Kernels* avx512_bf16_kernels(Dtype dtype);
const Kernels* amx_kernels(Dtype dtype);

}  // namespace pagemill::linear_detail
