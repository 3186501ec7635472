// Linear layers over int8 weights and int8 activations: out = (x_q - zero) @ weight_q.T * scales, with
// what follows it fused as in linear.
//
// A weight is code * scale of its output, a code from -128 to 127. Activations are float32 or bfloat16
// and become codes on the way in, row by row (Rounding), while they are copied into the buffer that the
// tiles are multiplied with.
//
// Packed layout, one for every path: tiles of 16 outputs by 64 k, one after the other along K, so that
// a group of outputs is one stream. A row of a tile is 64 bytes:
//
//   [ceil(N/16)] [ceil(K/64)] [16 rows r] [16 outputs n] [4 bytes]     byte i: code[n][k + 4r + i] + 128
//
// Groups of four along K are what vpdpbusd multiplies, and a tile is a tile of AMX. The 128
// makes codes unsigned, as vpdpbusd wants one side; 128 times the row's sum of activation codes is
// subtracted afterwards. Scales, and the codes' sums where zero points need them, are
// [ceil(N/16) * 16] in the order of the tiles.
//
// Exactness: sums are whole numbers in int32 and never overflow (K is at most 65536), so their order is
// free; a sum is converted to float32, times the row's scale, times the output's, each rounded. A row
// of the result hangs on that row of x and the weights alone, and not even on the instruction set (but
// for the activation functions of gates).
#pragma once

#include <cstdint>

namespace pagemill {

// How a row of x becomes codes: round(x / scale) + zero, to nearest even, cut to [low, 127].
//   per_row      scale = largest absolute value / 127, zero 0, low -127
//   per_row_zero scale = (highest - lowest) / 255 with 0 among them, zero so that the lowest is -128
//   fixed        scale and zero as given, low -128
// A row that holds NaN, or with scales per row infinity, becomes NaN.
enum class Rounding : int { per_row = 0, per_row_zero = 1, fixed = 2 };

// Put weight codes [rows, k] int8 (`stride` bytes from row to row) and scales [rows] into tiles
// tile_first, tile_first + tile_step, ... of packed, of packed_scales and of sums (or 0).
void pack_int8(uintptr_t codes, int64_t rows, int64_t k, int64_t stride, uintptr_t scales,
               uintptr_t packed, uintptr_t packed_scales, uintptr_t sums, int64_t tile_first,
               int64_t tile_step);

// The same from weights [rows, k] of `dtype` (`stride` elements): scale = largest absolute value / 127
// of each row, codes rounded to nearest even. A row that is not finite throws.
void quantize_int8(uintptr_t weight, int64_t rows, int64_t k, int64_t stride, int dtype,
                   uintptr_t packed, uintptr_t packed_scales, int64_t tile_first,
                   int64_t tile_step);

// Copy row ids[i] of the packed matrix, code times scale, to out[i, 0..k) of `dtype`.
void linear_int8_rows(uintptr_t ids, int64_t count, uintptr_t packed, uintptr_t scales, int64_t n,
                      int64_t k, uintptr_t out, int dtype);

// Compute out[m, n] from x[m, k]. x and bias (or 0) have `dtype`, out and residual (or 0; it may be out
// itself) `out_dtype`. `n` counts output features: of a gated epilogue, packed has twice as many rows
// and bias 2n numbers, the gate's first. sums is needed where zero points may differ from 0.
void linear_int8(uintptr_t x, int64_t x_stride, int64_t m, int dtype, int rounding, float scale,
                 int zero, uintptr_t packed, uintptr_t scales, uintptr_t sums, int64_t n, int64_t k,
                 uintptr_t bias, uintptr_t residual, int64_t residual_stride, uintptr_t out,
                 int64_t out_stride, int out_dtype, int epilogue);

// The most bytes that `linear_int8` keeps of its own in the calling thread.
int64_t linear_int8_scratch_bytes();

// For benchmarks: multiply and add codes in registers alone, on every thread, `rounds` times; returns the
// operations done.
double peak_int8_ops(int64_t rounds);

}  // namespace pagemill
