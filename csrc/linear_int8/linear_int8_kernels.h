// What an instruction set offers `linear_int8`: see linear_int8_loops.h for how it is made.
#pragma once

#include <cstdint>

#include "linear/epilogue.h"
#include "linear_int8/linear_int8.h"

namespace pagemill::linear_int8_detail {

using linear_detail::Finish;
using linear_detail::kMaxTiles;
using linear_detail::kTile;

inline constexpr int64_t kTileBytes = 1024;  // 16 rows of 64 bytes
inline constexpr int64_t kTileDepth = 64;    // k of a tile
inline constexpr int kMaxRows = 32;          // of any path's row group

// One block of sums of products of codes: c[rows, tiles * 16] = (accumulate ? c : 0) + a @ b. a and c have
// as many rows as the row unit asks for.
struct Block {
  const char* a;  // [rows] of activation codes, in bytes or words
  int64_t a_stride;  // bytes
  const char* b;     // first tile; k tiles follow one another
  int64_t b_stride;  // bytes from one tile group to the next
  int64_t k_tiles;
  int32_t* c;
  int64_t c_stride;
  bool accumulate;
  // While it works on k tiles ahead_first..ahead_last, the block asks the caches for what lies `ahead`
  // bytes further on.
  int64_t ahead, ahead_first, ahead_last;
};

// One row of x to codes.
struct Quantize {
  const char* x;
  int dtype;
  int64_t k, padded;  // codes past k, to padded, are 0
  Rounding rounding;
  float scale;  // of Rounding::fixed
  int zero;
  int8_t* codes;  // [padded]
  char* to;       // what Block::a wants: the codes themselves where it is null
};

// What is known of a row of codes besides.
struct RowScale {
  float scale;
  int32_t zero;
  int32_t shift;  // 128 times the sum of its codes
};

// From sums to numbers: to[rows, width] = (c - shift - zero * sums) * row's scale * scales.
struct Scale {
  const int32_t* c;
  int64_t c_stride;
  int rows, width;
  const RowScale* of_rows;
  const float* scales;   // [width]
  const int32_t* sums;   // [width], or null
  float* to;             // contiguous
};

using MicroFn = void (*)(const Block&);

struct Kernels {
  int max_rows;                 // of a row group, where there are several
  int alone_rows;               // of one that is the only one
  // Of several row groups each begins at a multiple of this, and the last is filled up to one.
  int row_unit;
  // Rows of a chunk: as many as fill cache_bytes of the outer caches, but for least_chunk_rows.
  int64_t cache_bytes, least_chunk_rows;
  void (*begin)(int64_t rows);  // before a thread's calls for a chunk of so many rows; may be null
  void (*end)();
  int max_tiles[kMaxRows + 1];  // of a column group, by rows of the group
  bool words;                   // activation codes are words (w0, w2), (w1, w3) of each four
  MicroFn micro[kMaxRows + 1][kMaxTiles + 1];  // [rows][tiles]
  RowScale (*quantize)(const Quantize&);
  void (*scale)(const Scale&);
  void (*finish)(const Finish&);
  double (*peak)(int64_t rounds);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx2_vnni_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_vnni_kernels();
const Kernels* amx_kernels();

}  // namespace pagemill::linear_int8_detail
