// Linear layers over packed weights: out = x @ weight.T, with what follows it fused.
//
// Packed layout, one for every path and both dtypes: tiles of 16 output features. A tile row is 64
// bytes; tiles of one group of outputs lie one after the other along K, so that a group is one stream:
//
//   [ceil(N/16)] [ceil(K/kt)] [16 rows] [64 bytes]
//     float32   kt = 16: row r holds w[n..n+15][k + r]
//     bfloat16  kt = 32: row r holds the pairs (w[n][k + 2r], w[n][k + 2r + 1]) for n..n+15
//
// What lies past N or K is zero. Pairs are what dpbf16 and AMX want; the others take them apart with a
// shift and a mask.
//
// Exactness: an output is one accumulator that takes k = 0, 1, 2, ... in order, whatever the number
// of rows, the thread or the block it is computed in. So its bits depend on x's row and the weights
// alone (and on the instruction set).
#pragma once

#include <cstdint>

namespace pagemill {

// What is done to the sums before they are stored; `gated` ones take tiles in pairs (gate, up) and
// store act(gate) * up, half as many features.
enum class Epilogue : int { none = 0, silu_gated = 1, gelu_tanh_gated = 2 };

// Copy weight[rows, k] (`stride` elements from row to row) into tiles tile_first, tile_first +
// tile_step, ... of `packed`. Both have `dtype`.
void pack_linear(uintptr_t weight, int64_t rows, int64_t k, int64_t stride, uintptr_t packed,
                 int64_t tile_first, int64_t tile_step, int dtype);

// Write to each page of `tiles` zeroed tiles of k inputs, the thread that will read it first: the page
// then lies on that thread's NUMA node. `grain` tiles stay together, as in `linear`: 2 where gated.
void touch_tiles(uintptr_t packed, int64_t tiles, int64_t k, int64_t grain, int dtype);

// Copy row ids[i] of the packed matrix to out[i, 0..k); ids outside 0..n-1 throw.
void linear_rows(uintptr_t ids, int64_t count, uintptr_t packed, int64_t n, int64_t k,
                 uintptr_t out, int dtype);

// Compute out[m, n] from x[m, k] and packed[n, k]. x, bias (or 0) and packed have `dtype`; out and
// residual (or 0; it may be out itself) have `out_dtype`. `n` counts output features: of a gated
// epilogue, packed has twice as many rows and bias 2n numbers, the gate's first.
void linear(uintptr_t x, int64_t x_stride, int64_t m, uintptr_t packed, int64_t n, int64_t k,
            int dtype, uintptr_t bias, uintptr_t residual, int64_t residual_stride, uintptr_t out,
            int64_t out_stride, int out_dtype, int epilogue);

// The most bytes that `linear` keeps of its own in the calling thread.
int64_t linear_scratch_bytes();

}  // namespace pagemill
