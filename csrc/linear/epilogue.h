// What follows the sums of a linear layer, for every kind of weights: bias, gate, residual, rounding.
// Plain data; the loops are in epilogue_loops.h, which each instruction set compiles for itself.
#pragma once

#include <cstdint>

#include "common/vec.h"

namespace pagemill::linear_detail {

inline constexpr int kTile = 16;     // output features of a tile
inline constexpr int kMaxTiles = 4;  // that inner loops sum up at once
inline constexpr int kMaxFinishTiles = 6;  // that one call of the epilogue takes

// What follows the sums, for one block.
struct Finish {
  const float* c;     // [rows, tiles * 16]
  int rows, columns;  // columns: output features of the block that exist
  int tiles;
  int epilogue;       // Epilogue
  const void* bias;   // at the block's first feature, or null
  const void* up_bias;
  int dtype;          // of the biases
  const char* residual;
  int64_t residual_stride;  // bytes
  char* out;
  int64_t out_stride;  // bytes
  int out_dtype;
};

}  // namespace pagemill::linear_detail
