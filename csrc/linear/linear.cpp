#include "linear/linear.h"

#include "common/dispatch.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "linear/linear_work.h"

namespace pagemill {
namespace {

using namespace linear_detail;

// A chunk's activations, at most (but for one group of rows), and its sums where they wait for a
// further part of k.
constexpr int64_t kActivationBytes = int64_t{8} << 20;
constexpr int64_t kSumBytes = int64_t{8} << 20;
constexpr int64_t kMaxChunkRows = 768;
// Below this many numbers activations are copied before other threads are woken.
constexpr int64_t kSerialCopy = 1 << 16;

using KernelsFn = const Kernels* (*)(Dtype);
constexpr Table<KernelsFn> kTable = {{portable_kernels, PAGEMILL_IF_AVX2(avx2_kernels),
                                      PAGEMILL_IF_AVX512(avx512_kernels),
                                      PAGEMILL_IF_AVX512_BF16(avx512_bf16_kernels),
                                      PAGEMILL_IF_AMX(amx_kernels), nullptr, nullptr}};

// One thread's share of a chunk: some tiles of outputs.
//
// From the outside in: parts of k that are few enough for the caches to hold all their activations;
// column groups; blocks of k; row groups. A block of k of one column group stays in the inner caches for
// all rows. Whatever the loops, a sum meets its k in rising order.
class Share {
 public:
  Share(const Call& call, const Rows& rows, const char* a, float* c)
      : call_(call), rows_(rows), a_(a), c_(c) {}

  void run(int64_t first, int64_t last) const {
    const Kernels& kernels = *call_.kernels;
    const int64_t unit = call_.tiles_per_feature;  // both tiles of a gated pair are in one group
    const int64_t group = widest() % unit == 0 ? widest() : widest() * unit;
    const int64_t units = (last - first) / unit, columns = ceil_div(units, group / unit);
    if (kernels.begin != nullptr) kernels.begin(rows_.padded());
    for (int64_t split = 0; split < rows_.splits; ++split) {
      for (int64_t column = 0; column < columns; ++column)
        run_columns(split, first + part_start(units, columns, column) * unit,
                    first + part_start(units, columns, column + 1) * unit);
    }
    if (kernels.end != nullptr) kernels.end();
  }

 private:
  // Tiles that are summed up and stored together.
  struct Columns {
    int64_t tile;
    int tiles;
  };

  int64_t widest() const {
    const Kernels& kernels = *call_.kernels;
    return (rows_.groups == 1 ? kernels.tiles_alone : kernels.max_tiles)[rows_.group_rows()];
  }

  // The sums of the tiles from `tile` on.
  float* sums(int64_t tile) const {
    return rows_.splits == 1 ? c_ : c_ + tile * kTile * rows_.padded();
  }

  void run_columns(int64_t split, int64_t tile, int64_t end) const {
    const int64_t tiles = end - tile, parts = ceil_div(tiles, widest());
    const int64_t first_step = part_start(call_.steps, rows_.splits, split);
    const int64_t end_step = part_start(call_.steps, rows_.splits, split + 1);
    const int64_t b_stride = call_.k_tiles * kTileBytes;
    Block block{};
    block.b_stride = b_stride;
    block.c_stride = tiles * kTile;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t at = part_start(tiles, parts, part);
      block.tiles = static_cast<int>(part_start(tiles, parts, part + 1) - at);
      for (int64_t step = first_step; step < end_step; ++step) {
        const int64_t kt = call_.step_start(step);
        block.k_tiles = call_.step_start(step + 1) - kt;
        block.b = call_.packed + (tile + at) * b_stride + kt * kTileBytes;
        block.c = sums(tile) + at * kTile;
        block.accumulate = step > 0;
        // Past the end of this part of k come the next tiles.
        block.ahead = step + 1 < end_step ? block.k_tiles * kTileBytes
                                          : block.tiles * b_stride -
                                                (kt - call_.step_start(first_step)) * kTileBytes;
        const bool last = part + 1 == parts && step + 1 == call_.steps;
        run_rows(block, step, last ? Columns{tile, static_cast<int>(tiles)} : Columns{});
      }
    }
  }

  // All row groups of one block of k; the sums of `done`, which may be none, are then complete.
  void run_rows(Block& block, int64_t step, const Columns& done) const {
    float* c = block.c;
    for (int64_t group = 0; group < rows_.groups; ++group) {
      const int64_t row = rows_.group_start(group);
      block.rows = static_cast<int>(rows_.group_start(group + 1) - row);
      block.a = a_ + group_offset(call_, rows_, step, row);
      block.c = c + row * block.c_stride;
      block.ahead_first = part_start(block.k_tiles, rows_.groups, group);
      block.ahead_last = part_start(block.k_tiles, rows_.groups, group + 1);
      call_.kernels->run(block);
      if (done.tiles > 0) finish(done, row, least(block.rows, rows_.count - row));
    }
  }

  // Store what the sums of `count` rows from `row` on become.
  void finish(const Columns& done, int64_t row, int64_t count) const {
    const int64_t unit = call_.tiles_per_feature;
    const int64_t feature = done.tile / unit * kTile, at = rows_.start + row;
    const int64_t in_bytes = item_bytes(call_.dtype), out_bytes = item_bytes(call_.out_dtype);
    Finish f{};
    f.c = sums(done.tile) + row * done.tiles * kTile;
    f.rows = static_cast<int>(count);
    f.columns = static_cast<int>(least(call_.n - feature, done.tiles / unit * kTile));
    f.tiles = done.tiles;
    f.epilogue = call_.epilogue;
    if (call_.bias != nullptr) {
      f.bias = call_.bias + feature * in_bytes;
      f.up_bias = call_.bias + (call_.n + feature) * in_bytes;
    }
    f.dtype = call_.dtype;
    if (call_.residual != nullptr)
      f.residual = call_.residual + at * call_.residual_stride + feature * out_bytes;
    f.residual_stride = call_.residual_stride;
    f.out = call_.out + at * call_.out_stride + feature * out_bytes;
    f.out_stride = call_.out_stride;
    f.out_dtype = call_.out_dtype;
    call_.kernels->finish(f);
  }

  const Call& call_;
  const Rows& rows_;
  const char* a_;
  float* c_;
};

Rows make_rows(const Call& call, int64_t start, int64_t count) {
  const Kernels& kernels = *call.kernels;
  Rows rows{start, count, count, 1, 1, 1};
  if (count > kernels.few_rows) {
    rows.unit = kernels.row_unit;
    rows.units = ceil_div(count, rows.unit);
    rows.groups = ceil_div(rows.padded(), kernels.group_rows);
  }
  if (kernels.splits_k)
    rows.splits = least(call.steps, ceil_div(count * call.row_bytes(), kernels.cache_bytes));
  return rows;
}

// The most rows of a chunk.
int64_t chunk_rows(const Call& call) {
  const Kernels& kernels = *call.kernels;
  int64_t rows = kernels.cache_bytes / call.row_bytes();
  if (rows < kernels.least_chunk_rows) rows = kernels.least_chunk_rows;
  rows = least(least(rows, kMaxChunkRows), kActivationBytes / call.row_bytes());
  if (kernels.splits_k) rows = least(rows, kSumBytes / (call.n_tiles * kTile * 4));
  rows = rows / kernels.group_rows * kernels.group_rows;
  return rows < kernels.group_rows ? kernels.group_rows : rows;
}

void run_chunk(const Call& call, Scratch& scratch, const Rows& rows) {
  // One row in its own type lies as it should.
  const bool in_place = rows.count == 1 && call.k == call.k_tiles * tile_depth(call.dtype) &&
                        !call.kernels->wide;
  const int64_t a_bytes = in_place ? 0 : rows.padded() * call.row_bytes();
  // Sums of one column group a thread, or of all columns where they wait for a further part of k.
  const int64_t thread_floats = rows.padded() * kMaxFinishTiles * kTile;
  const int64_t c_floats = rows.splits == 1 ? num_threads() * thread_floats
                                            : rows.padded() * call.n_tiles * kTile;
  char* memory = static_cast<char*>(
      scratch.get(a_bytes + c_floats * static_cast<int64_t>(sizeof(float))));
  float* c = reinterpret_cast<float*>(memory + a_bytes);
  if (!in_place) {
    const auto copy = [&](int64_t first, int64_t last) {
      copy_activations(call, rows, first, last, memory);
    };
    if (rows.count * call.k <= kSerialCopy) {
      copy(0, rows.groups);
    } else {
      parallel_for(rows.groups, 1, copy);
    }
  }
  const char* a = in_place ? call.x + rows.start * call.x_stride : memory;
  parallel_for(call.n_tiles, call.tiles_per_feature, [&](int64_t first, int64_t last) {
    float* own = rows.splits == 1 ? c + part_index() * thread_floats : c;
    Share(call, rows, a, own).run(first, last);
  });
}

}  // namespace

void linear(uintptr_t x, int64_t x_stride, int64_t m, uintptr_t packed, int64_t n, int64_t k,
            int dtype, uintptr_t bias, uintptr_t residual, int64_t residual_stride, uintptr_t out,
            int64_t out_stride, int out_dtype, int epilogue) {
  check_dtype(dtype, "linear");
  check_dtype(out_dtype, "linear");
  check(m >= 0 && n >= 1 && k >= 1, "linear", "sizes", "must be m >= 0, n >= 1, k >= 1");
  check(m <= 1 || (x_stride >= k && out_stride >= n), "linear", "strides",
        "must be at least the row's length");
  check(packed % 64 == 0 && packed != 0, "linear", "packed", "must lie on 64 bytes");
  check(epilogue >= 0 && epilogue <= 2, "linear", "epilogue", "must be 0, 1 or 2");
  if (m == 0) return;
  check(x != 0 && out != 0, "linear", "x and out", "must not be null");
  const int64_t depth = tile_depth(dtype), k_tiles = ceil_div(k, depth);
  const int unit = epilogue == 0 ? 1 : 2;
  const Call call{pick(kTable)(static_cast<Dtype>(dtype)),
                  reinterpret_cast<const char*>(x),
                  x_stride * item_bytes(dtype),
                  k,
                  k_tiles,
                  ceil_div(k_tiles, kTilesOfK),
                  reinterpret_cast<const char*>(packed),
                  n,
                  ceil_div(n, kTile) * unit,
                  dtype,
                  reinterpret_cast<const char*>(bias),
                  reinterpret_cast<const char*>(residual),
                  residual_stride * item_bytes(out_dtype),
                  reinterpret_cast<char*>(out),
                  out_stride * item_bytes(out_dtype),
                  out_dtype,
                  epilogue,
                  unit};
  thread_local Scratch scratch;
  const int64_t chunks = ceil_div(m, chunk_rows(call));
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t row = part_start(m, chunks, i), count = part_start(m, chunks, i + 1) - row;
    run_chunk(call, scratch, make_rows(call, row, count));
  }
}

int64_t linear_scratch_bytes() {
  const int64_t sums = kMaxChunkRows * kMaxFinishTiles * kTile * static_cast<int64_t>(sizeof(float));
  const bool splits = pick(kTable)(Dtype::bfloat16)->splits_k;
  return Scratch::taken(kActivationBytes + num_threads() * sums + (splits ? kSumBytes : 0));
}

}  // namespace pagemill
