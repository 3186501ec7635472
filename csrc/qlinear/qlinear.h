// Linear layers over weights of 4 or 8 bits in groups that share a scale; activations stay in the model's
// dtype. out = x @ weight.T, with what follows it fused as in `linear`.
//
// A weight is scale * code, scale * code + min, or scale * (code - zero). Layout: tiles of 16 outputs x
// 32 inputs, those of one group of outputs one after the other along K:
//
//   codes        [tiles][ceil(K/32)][lines][64 bytes]     4 lines of 4-bit codes, 8 of bytes
//   scales       [tiles][groups][16] float16
//   offsets      [tiles][groups][16] float16: mins or zeros
//   multipliers  [tiles][16] float32: times everything of that output
//
//   a line is 16 words of 32 bits, one an output; a word's low half has the even inputs, the high half the
//   odd ones, from the lowest bit on:
//
//     4 bits:   31   high half    16 15    low half     0       8 bits:  31  high   16 15   low    0
//              | k+7 k+5 k+3 k+1 | k+6 k+4 k+2 k+0 |                   | k+3   k+1 | k+2   k+0 |
//
// So a shift brings a pair of inputs to the lowest bits of both halves, and one permute of 16-bit words,
// which looks at the lowest bits alone, turns 4-bit codes of 16 outputs into the bfloat16 pairs that
// dpbf16 wants. Codes are whole numbers below 257 or float8: exact in bfloat16.
//
// Exactness: an output's sum over one group of inputs starts at zero and takes k in order; the groups'
// sums, times their scales, are added in order, and the multiplier comes last. The sums of x that mins and
// zeros need are taken in one fixed order a row. So bits depend on x's row and the weights alone (and
// on the instruction set), not on how many rows there are or whether codes were decoded for one
// product or for many.
#pragma once

#include <cstdint>
#include <vector>

namespace pagemill {

enum class Codec : int { int4 = 0, int8 = 1, fp8 = 2 };
enum class Offset : int { none = 0, min = 1, zero = 2 };

// A packed matrix: where its tensors lie (they are the caller's and stay where they are) and what a
// 4-bit code stands for.
class QMatrix {
 public:
  // n counts the outputs of one of the `parts` (1, or 2 whose tiles alternate); `group` is 16, a
  // multiple of 32, or all of k or more; offsets are 0 without; `table` has 16 whole numbers from -128
  // to 127 for 4-bit codes and none for others.
  QMatrix(int codec, int64_t group, int64_t n, int64_t k, int parts, uintptr_t codes,
          uintptr_t scales, uintptr_t offsets, int offset, uintptr_t multipliers,
          const std::vector<int>& table);

  int codec, offset, parts;
  int64_t n, k;
  int64_t n_tiles, k_tiles;  // n_tiles: of all parts
  int64_t half_bytes;        // of the codes of 16 outputs x 16 inputs
  int64_t group_halves;      // 16 inputs each
  int64_t groups;            // an output's scales
  const char* codes;
  const uint16_t *scales, *offsets;
  const float* multipliers;
  uint16_t pairs[32];  // the table in bfloat16, twice: an index may have a stray fifth bit
  float wide[16];
  int8_t bytes[16];
};

// Compute out[m, n] from x[m, k]. x and bias (or 0) have `dtype`; out and residual (or 0; it may be out
// itself) have `out_dtype`. Epilogue as in linear.h; a gated one needs two parts and bias [2n].
void qlinear(const QMatrix& matrix, uintptr_t x, int64_t x_stride, int64_t m, int dtype,
             uintptr_t bias, uintptr_t residual, int64_t residual_stride, uintptr_t out,
             int64_t out_stride, int out_dtype, int epilogue);

// Write the weights of row ids[i] to out[i, 0..k) in `dtype`; ids outside 0..n-1 throw. One part only.
void qlinear_rows(const QMatrix& matrix, uintptr_t ids, int64_t count, uintptr_t out, int dtype);

// Copy plain codes[rows, k] (one a byte, `stride` from row to row) into the tiles tile_first, tile_first +
// tile_step, ... of `packed`, whose padding is zero already.
void qlinear_pack(uintptr_t codes, int64_t rows, int64_t k, int64_t stride, int bits,
                  uintptr_t packed, int64_t tile_first, int64_t tile_step);

// Quantize weight[rows, k] to plain codes[rows, k] of a table of 16 rising whole numbers and
// scales[rows, ceil(k / 32)] float32; the same bits on every path. A group with a NaN or an infinite
// number gets a scale that is not finite.
void qlinear_quantize(uintptr_t weight, int64_t rows, int64_t k, int64_t stride, int dtype,
                      const std::vector<int>& table, uintptr_t codes, uintptr_t scales);

// The most bytes that `qlinear` keeps of its own, all threads together.
int64_t qlinear_scratch_bytes();

}  // namespace pagemill
