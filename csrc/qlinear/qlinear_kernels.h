// What an instruction set offers `qlinear`: see qlinear_micro.h for how it is made.
#pragma once

#include <cstdint>

#include "linear/epilogue.h"
#include "qlinear/qlinear.h"

namespace pagemill::qlinear_detail {

using linear_detail::Finish;
using linear_detail::kMaxFinishTiles;
using linear_detail::kTile;

inline constexpr int kCodecs = 3;
inline constexpr int kMaxRows = 8;     // of any path's row group
inline constexpr int64_t kHalf = 16;   // inputs of half a tile, the smallest group
inline constexpr int64_t kAloneHalves = 4;  // see Kernels::alone

inline constexpr int kQuantized = 32;  // numbers of a group that is quantized here

// 16 values in rising order, the middles between neighbours and their distances.
struct QuantTable {
  float values[16], middles[15], steps[15];
};

// One block of sums: 16 outputs a tile, `halves` times 16 inputs. Numbers of pairs are bfloat16 and
// activations too; wide ones are float32.
struct Block {
  const QMatrix* matrix;
  const char* a;       // [rows], a_stride bytes apart
  int64_t a_stride;
  const char* b;       // of the first tile: codes, or numbers that were decoded before
  int64_t b_stride;    // bytes from one tile to the next
  const uint16_t* scales;   // of the first tile and the block's first group
  const uint16_t* offsets;  // or null
  const float* x_sums;      // [rows], groups apart: sums of x over the block's first group
  int64_t halves;
  int64_t left;    // halves that the first group has in this block and later ones
  bool resume;     // the first group began in an earlier block
  float* totals;   // [rows], c_stride floats apart
  float* partial;  // the same, of the group under way at the edges of blocks
  int64_t c_stride;
  int64_t to_end;  // halves from the block's begin to the end of K
};

using MicroFn = void (*)(const Block&);
// Decode halves of one tile: [inputs or pairs of them][16] floats or bfloat16 pairs.
using UnpackFn = void (*)(const QMatrix&, const char* codes, int64_t halves, char* to);

struct Kernels {
  bool pairs;  // bfloat16 activations stay bfloat16 (else float32)
  int max_rows[2];  // [pairs]: of a row group over decoded numbers
  int direct_rows[2];  // [pairs]: up to here codes are decoded on their way, into registers
  // The tiles that a function sums up at once; there is always one for single tiles too.
  int direct_tiles[2][kMaxRows + 1];  // [pairs][rows]
  int decoded_tiles[2];               // [pairs]
  MicroFn direct[kCodecs][2][kMaxRows + 1][2];  // [codec][pairs][rows][widest]
  // Of one row and one tile with groups of at most kAloneHalves: in larger ones too few sums are under
  // way. May be null.
  MicroFn alone[kCodecs][2];  // [codec][pairs]
  MicroFn decoded[2][kMaxRows + 1][2];          // [pairs][rows][widest]
  UnpackFn unpack[kCodecs][2];                  // [codec][pairs]
  void (*finish)(const Finish&);
  // Codes [kQuantized] and the scale of as many numbers.
  void (*quantize)(const QuantTable&, const float* numbers, float* scale, uint8_t* codes);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();

}  // namespace pagemill::qlinear_detail
