// What an instruction set offers `linear`: see linear_micro.h for how it is made.
#pragma once

#include <cstdint>

#include "common/vec.h"
#include "linear/epilogue.h"

namespace pagemill::linear_detail {

inline constexpr int64_t kTileBytes = 1024;  // 16 rows of 64 bytes
// Activations of one row and of one block of k. The blocks of a row group lie side by side: rows read
// where the caller has them, a power of two apart, would push each other out of the first cache.
inline constexpr int64_t kTilesOfK = 8;
inline constexpr int64_t kSlotBytes = kTilesOfK * 64;
inline constexpr int64_t kWideSlotBytes = 2 * kSlotBytes;
inline constexpr int kMaxRows = 16;         // of any path's row group

// One block of sums: c[rows, tiles * 16] = (accumulate ? c : 0) + a @ b.
struct Block {
  const char* a;      // [rows] slots of kSlotBytes (kWideSlotBytes for bfloat16 widened to float32)
  const char* b;      // first tile; k tiles follow one another
  int64_t b_stride;   // bytes from one tile group to the next
  int64_t k_tiles;
  float* c;           // contiguous
  bool accumulate;
  // While it works on k tiles ahead_first..ahead_last, the block asks the caches for what lies `ahead`
  // bytes further on: the weights of the next block of k.
  int64_t ahead, ahead_first, ahead_last;
};

using MicroFn = void (*)(const Block&);

struct Kernels {
  int max_rows;                     // of a row group
  int max_tiles[kMaxRows + 1];      // of a column group, by rows of the group
  bool pairs;                       // bfloat16 activations stay bfloat16 (else float32 in the tiles)
  MicroFn micro[2][kMaxRows + 1][kMaxTiles + 1];  // [dtype][rows][tiles]
  void (*finish)(const Finish&);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();

}  // namespace pagemill::linear_detail
