// What the files of `linear` share: sizes, one call, and the rows of a chunk. Internal linkage.
#pragma once

#include <cstdint>

#include "common/sizes.h"
#include "linear/linear_kernels.h"

namespace pagemill::linear_detail {

static inline int64_t tile_depth(int dtype) { return 64 / item_bytes(dtype); }  // k of a tile

struct Call {
  const Kernels* kernels;
  const char* x;
  int64_t x_stride;  // bytes
  int64_t k, k_tiles;
  int64_t steps;  // blocks of at most kTilesOfK tiles
  const char* packed;
  int64_t n, n_tiles;
  int dtype;
  const char *bias, *residual;
  int64_t residual_stride;  // bytes
  char* out;
  int64_t out_stride;  // bytes
  int out_dtype;
  int epilogue;
  int tiles_per_feature;  // 2 for gated epilogues

  int64_t step_start(int64_t step) const { return part_start(k_tiles, steps, step); }
  // Bytes of one row's activations of one k tile, and of all.
  int64_t line_bytes() const { return kernels->wide ? 128 : 64; }
  int64_t row_bytes() const { return k_tiles * line_bytes(); }
};

// The rows of one chunk, and the groups that they are summed up in.
struct Rows {
  int64_t start, count;
  int64_t unit, units;  // groups begin at multiples of `unit`
  int64_t groups;
  int64_t splits;  // of k: so many times all outputs are gone through

  int64_t padded() const { return unit * units; }
  int64_t group_rows() const { return ceil_div(units, groups) * unit; }  // of the largest
  int64_t group_start(int64_t group) const { return part_start(units, groups, group) * unit; }
};

// Where the activations of a block of k begin, of the group that begins at `row`: see Kernels.
static inline int64_t group_offset(const Call& call, const Rows& rows, int64_t step, int64_t row) {
  const int64_t kt = call.step_start(step), k_tiles = call.step_start(step + 1) - kt;
  return call.line_bytes() * (kt * rows.padded() + row * k_tiles);
}

// Copy the activations of groups first..last of a chunk to `to`, which holds all of them.
void copy_activations(const Call& call, const Rows& rows, int64_t first, int64_t last, char* to);

}  // namespace pagemill::linear_detail
