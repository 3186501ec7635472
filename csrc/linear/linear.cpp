#include "linear/linear.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "common/check.h"
#include "common/dispatch.h"
#include "common/parallel.h"
#include "linear/linear_kernels.h"

namespace pagemill {
namespace {

using namespace linear_detail;

// Activations in tiles: as many rows at once as fit, so that they stay in the outer caches while the
// weights stream past them.
constexpr int64_t kScratchBytes = int64_t{8} << 20;
constexpr int64_t kMaxChunkRows = 768;
// Below this many numbers the copy into tiles is done before other threads are woken.
constexpr int64_t kSerialCopy = 1 << 16;

using KernelsFn = const Kernels* (*)();
constexpr Table<KernelsFn> kTable = {{portable_kernels, PAGEMILL_IF_AVX2(avx2_kernels),
                                      PAGEMILL_IF_AVX512(avx512_kernels),
                                      PAGEMILL_IF_AVX512_BF16(avx512_bf16_kernels), nullptr}};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

bool is_float(int dtype) { return dtype == static_cast<int>(Dtype::float32); }
int64_t item_bytes(int dtype) { return is_float(dtype) ? 4 : 2; }
int64_t tile_depth(int dtype) { return 64 / item_bytes(dtype); }  // k of a tile

void check_dtype(int dtype, const char* op) {
  check(dtype == 0 || dtype == 1, op, "dtype", "must be 0 (float32) or 1 (bfloat16)");
}

// A cache-line aligned buffer that grows and is kept.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  void* get(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

// `parts` even parts of `count`: where part i begins.
int64_t part_start(int64_t count, int64_t parts, int64_t i) { return count * i / parts; }

// The rows of one chunk, and into how many groups they are split.
struct Rows {
  int64_t start, count, groups;
};

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

  int64_t slot_bytes() const {
    return is_float(dtype) || kernels->pairs ? kSlotBytes : kWideSlotBytes;
  }
  int64_t row_bytes() const { return steps * slot_bytes(); }
};

// Copy the rows first..last of a chunk into slots, [blocks of k][rows of the chunk][a slot], with zeros
// past k.
void copy_rows(const Call& call, const Rows& rows, int64_t first, int64_t last, char* to) {
  const int64_t slot = call.slot_bytes(), depth = tile_depth(call.dtype);
  for (int64_t row = first; row < last; ++row) {
    const char* x = call.x + (rows.start + row) * call.x_stride;
    for (int64_t step = 0; step < call.steps; ++step) {
      const int64_t k = part_start(call.k_tiles, call.steps, step) * depth;
      const int64_t end = part_start(call.k_tiles, call.steps, step + 1) * depth;
      const int64_t whole = min(end, call.k) - k;
      char* a = to + (step * rows.count + row) * slot;
      if (is_float(call.dtype) || call.kernels->pairs) {
        const int64_t item = item_bytes(call.dtype);
        std::memcpy(a, x + k * item, static_cast<size_t>(whole * item));
        std::memset(a + whole * item, 0, static_cast<size_t>((end - k - whole) * item));
      } else {
        const bf16* from = reinterpret_cast<const bf16*>(x) + k;
        float* wide = reinterpret_cast<float*>(a);
        for (int64_t i = 0; i < whole; ++i) wide[i] = to_float(from[i]);
        for (int64_t i = whole; i < end - k; ++i) wide[i] = 0.0f;
      }
    }
  }
}

// Compute one block of sums; a path that has none as wide does it tile by tile.
void run_block(const Kernels& kernels, const Call& call, const Block& sums, int m, int tiles) {
  const auto& micro = kernels.micro[is_float(call.dtype) ? 0 : 1][m];
  if (tiles <= kernels.max_tiles[m]) {
    micro[tiles](sums);
    return;
  }
  alignas(64) float one[kMaxRows * kTile];
  for (int t = 0; t < tiles; ++t) {
    Block single = sums;
    single.b += t * sums.b_stride;
    single.c = one;
    for (int i = 0; sums.accumulate && i < m; ++i)
      std::memcpy(one + i * kTile, sums.c + (i * tiles + t) * kTile, kTile * sizeof(float));
    micro[1](single);
    for (int i = 0; i < m; ++i)
      std::memcpy(sums.c + (i * tiles + t) * kTile, one + i * kTile, kTile * sizeof(float));
  }
}

// Store what the sums of m rows from `row` and of `tiles` tiles from `tile` become.
void finish(const Call& call, const float* c, int64_t row, int m, int64_t tile, int tiles) {
  const int64_t unit = call.tiles_per_feature;
  const int64_t feature = tile / unit * kTile;
  const int64_t in_bytes = item_bytes(call.dtype), out_bytes = item_bytes(call.out_dtype);
  Finish f{};
  f.c = c;
  f.rows = m;
  f.columns = static_cast<int>(min(call.n - feature, tiles / unit * kTile));
  f.tiles = tiles;
  f.epilogue = call.epilogue;
  if (call.bias != nullptr) {
    f.bias = call.bias + feature * in_bytes;
    f.up_bias = call.bias + (call.n + feature) * in_bytes;
  }
  f.dtype = call.dtype;
  if (call.residual != nullptr)
    f.residual = call.residual + row * call.residual_stride + feature * out_bytes;
  f.residual_stride = call.residual_stride;
  f.out = call.out + row * call.out_stride + feature * out_bytes;
  f.out_stride = call.out_stride;
  f.out_dtype = call.out_dtype;
  call.kernels->finish(f);
}

// The activations of a chunk: in slots, or one row as it lies.
struct Slots {
  const char* data;
  bool in_place;
};

// The tiles first..last of one call: column groups, blocks of k, row groups, from the outside in. A
// block of k of one column group stays in the inner caches for all rows; sums wait in `c`.
void run_tiles(const Call& call, const Slots& a, float* c, const Rows& rows, int64_t first,
               int64_t last) {
  const Kernels& kernels = *call.kernels;
  const int most = static_cast<int>(ceil_div(rows.count, rows.groups));
  const int64_t unit = call.tiles_per_feature;  // both tiles of a gated pair are in one group
  int64_t widest = kernels.max_tiles[most] / unit * unit;
  if (widest == 0) widest = unit;
  const int64_t units = (last - first) / unit;
  const int64_t columns = ceil_div(units, widest / unit);
  const int64_t b_stride = call.k_tiles * kTileBytes;
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t tile = first + part_start(units, columns, column) * unit;
    const int64_t end = first + part_start(units, columns, column + 1) * unit;
    const int tiles = static_cast<int>(end - tile);
    for (int64_t step = 0; step < call.steps; ++step) {
      const int64_t kt = part_start(call.k_tiles, call.steps, step);
      const int64_t k_tiles = part_start(call.k_tiles, call.steps, step + 1) - kt;
      for (int64_t group = 0; group < rows.groups; ++group) {
        const int64_t row = part_start(rows.count, rows.groups, group);
        const int m = static_cast<int>(part_start(rows.count, rows.groups, group + 1) - row);
        const Block sums{a.in_place ? a.data + kt * 64
                                    : a.data + (step * rows.count + row) * call.slot_bytes(),
                         call.packed + tile * b_stride + kt * kTileBytes,
                         b_stride,
                         k_tiles,
                         c + row * tiles * kTile,
                         step > 0,
                         // Past the end of k comes the next column group.
                         step + 1 < call.steps ? k_tiles * kTileBytes
                                          : tiles * b_stride - kt * kTileBytes,
                         part_start(k_tiles, rows.groups, group),
                         part_start(k_tiles, rows.groups, group + 1)};
        run_block(kernels, call, sums, m, tiles);
        if (step + 1 == call.steps) finish(call, sums.c, rows.start + row, m, tile, tiles);
      }
    }
  }
}

void run_chunk(const Call& call, Scratch& scratch, const Rows& rows) {
  // One row in its own type lies as it should.
  const bool in_place = rows.count == 1 && call.k == call.k_tiles * tile_depth(call.dtype) &&
                        (is_float(call.dtype) || call.kernels->pairs);
  const int64_t a_bytes = in_place ? 0 : rows.count * call.row_bytes();
  const int64_t c_floats = rows.count * kMaxTiles * kTile;
  char* memory = static_cast<char*>(
      scratch.get(a_bytes + num_threads() * c_floats * static_cast<int64_t>(sizeof(float))));
  float* c = reinterpret_cast<float*>(memory + a_bytes);
  if (!in_place) {
    const auto copy = [&](int64_t first, int64_t last) {
      copy_rows(call, rows, first, last, memory);
    };
    if (rows.count * call.k <= kSerialCopy) {
      copy(0, rows.count);
    } else {
      parallel_for(rows.count, 8, copy);
    }
  }
  const Slots a{in_place ? call.x + rows.start * call.x_stride : memory, in_place};
  parallel_for(call.n_tiles, call.tiles_per_feature, [&](int64_t first, int64_t last) {
    run_tiles(call, a, c + part_index() * c_floats, rows, first, last);
  });
}

}  // namespace

void pack_linear(uintptr_t weight, int64_t rows, int64_t k, int64_t stride, uintptr_t packed,
                 int64_t tile_first, int64_t tile_step, int dtype) {
  check_dtype(dtype, "pack_linear");
  check(rows >= 0 && k >= 1, "pack_linear", "weight", "must be [rows >= 0, k >= 1]");
  check(stride >= k || rows <= 1, "pack_linear", "stride", "must be at least k");
  check(tile_first >= 0 && tile_step >= 1, "pack_linear", "tiles", "must begin at 0 or later");
  check(packed % 64 == 0 && packed != 0, "pack_linear", "packed", "must lie on 64 bytes");
  const int64_t item = item_bytes(dtype), depth = tile_depth(dtype);
  const int64_t k_tiles = ceil_div(k, depth);
  const char* from = reinterpret_cast<const char*>(weight);
  char* to = reinterpret_cast<char*>(packed);
  parallel_for(ceil_div(rows, kTile), 1, [=](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; ++tile) {
      char* stream = to + (tile_first + tile * tile_step) * k_tiles * kTileBytes;
      const int64_t n_here = min(kTile, rows - tile * kTile);
      for (int64_t kt = 0; kt < k_tiles; ++kt) {
        const int64_t bytes = min(depth, k - kt * depth) * item;
        char* block = stream + kt * kTileBytes;
        for (int64_t i = 0; i < kTile; ++i) {
          uint32_t line[16] = {};
          if (i < n_here) {
            std::memcpy(line, from + ((tile * kTile + i) * stride + kt * depth) * item,
                        static_cast<size_t>(bytes));
          }
          for (int r = 0; r < 16; ++r) std::memcpy(block + r * 64 + i * 4, &line[r], 4);
        }
      }
    }
  });
}

void linear_rows(uintptr_t ids, int64_t count, uintptr_t packed, int64_t n, int64_t k,
                 uintptr_t out, int dtype) {
  check_dtype(dtype, "linear_rows");
  check(n >= 1 && k >= 1 && count >= 0, "linear_rows", "sizes", "must be positive");
  const int64_t item = item_bytes(dtype), depth = tile_depth(dtype);
  const int64_t k_tiles = ceil_div(k, depth);
  const int64_t* rows = reinterpret_cast<const int64_t*>(ids);
  for (int64_t i = 0; i < count; ++i)
    check(rows[i] >= 0 && rows[i] < n, "linear_rows", "ids", "must be rows of the matrix");
  const char* from = reinterpret_cast<const char*>(packed);
  char* to = reinterpret_cast<char*>(out);
  parallel_for(count, 16, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const char* stream = from + rows[i] / kTile * k_tiles * kTileBytes + rows[i] % kTile * 4;
      char* row = to + i * k * item;
      const int64_t words = k * item / 4;
      for (int64_t w = 0; w < words; ++w) std::memcpy(row + w * 4, stream + w * 64, 4);
      if (k * item % 4 != 0) std::memcpy(row + words * 4, stream + words * 64, 2);
    }
  });
}

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
  const Call call{pick(kTable)(),
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
  const int64_t group = call.kernels->max_rows;
  int64_t most = min(kMaxChunkRows, kScratchBytes / call.row_bytes()) / group * group;
  if (most < group) most = group;
  const int64_t chunks = ceil_div(m, most);
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t row = part_start(m, chunks, i), count = part_start(m, chunks, i + 1) - row;
    run_chunk(call, scratch, Rows{row, count, ceil_div(count, group)});
  }
}

int64_t linear_scratch_bytes() {
  const int64_t sums = kMaxChunkRows * kMaxTiles * kTile * static_cast<int64_t>(sizeof(float));
  return kScratchBytes + num_threads() * sums;
}

}  // namespace pagemill
