#include "linear_int8/linear_int8.h"

#include <atomic>
#include <cstring>
#include <vector>

#include "common/dispatch.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "common/sizes.h"
#include "linear_int8/linear_int8_kernels.h"

namespace pagemill {
namespace {

using namespace linear_int8_detail;

// Codes of as many rows at once as fit, so that they stay in the outer caches while the weights stream
// past them.
constexpr int64_t kScratchBytes = int64_t{8} << 20;
constexpr int64_t kMaxChunkRows = 768;
// The weights of a column group and a block of k stay in the second cache for all row groups; those of
// the next block are asked for meanwhile.
constexpr int64_t kTilesOfK = 128;
// Below this many numbers codes are made before other threads are woken.
constexpr int64_t kSerialCodes = 1 << 16;
// 255 * 128 * K must fit an int32.
constexpr int64_t kMostK = 65536;

using KernelsFn = const Kernels* (*)();
constexpr Table<KernelsFn> kTable = {
    {portable_kernels, PAGEMILL_IF_AVX2(avx2_kernels), PAGEMILL_IF_AVX512(avx512_kernels), nullptr,
     PAGEMILL_IF_AMX(amx_kernels), PAGEMILL_IF_AVX2_VNNI(avx2_vnni_kernels),
     PAGEMILL_IF_AVX512_VNNI(avx512_vnni_kernels)}};

struct Call {
  const Kernels* kernels;
  const char* x;
  int64_t x_stride;  // bytes
  int dtype;
  Rounding rounding;
  float scale;
  int zero;
  const char* packed;
  const float* scales;
  const int32_t* sums;
  int64_t n, n_tiles, k, k_tiles;
  const char *bias, *residual;
  int64_t residual_stride;  // bytes
  char* out;
  int64_t out_stride;  // bytes
  int out_dtype;
  int epilogue;
  int tiles_per_feature;  // 2 for gated epilogues

  int64_t padded() const { return k_tiles * kTileDepth; }
  // Bytes of a row's codes: an odd number of cache lines, so that rows do not meet in one set.
  int64_t row_bytes() const {
    const int64_t bytes = padded() * (kernels->words ? 2 : 1);
    return (bytes / 64) % 2 == 0 ? bytes + 64 : bytes;
  }
};

// The rows of one chunk and their codes, and the groups that they are multiplied in.
struct Rows {
  int64_t start, count;
  int64_t unit, units;  // groups begin at multiples of `unit`
  int64_t groups;
  const char* codes;  // [padded()] rows of row_bytes
  const RowScale* scales;

  int64_t padded() const { return unit * units; }
  int64_t group_rows() const { return ceil_div(units, groups) * unit; }  // of the largest
  int64_t group_start(int64_t group) const { return part_start(units, groups, group) * unit; }
};

Rows make_rows(const Kernels& kernels, int64_t start, int64_t count) {
  Rows rows{start, count, count, 1, 1, nullptr, nullptr};
  if (count > kernels.alone_rows) {
    rows.unit = kernels.row_unit;
    rows.units = ceil_div(count, rows.unit);
    rows.groups = ceil_div(rows.padded(), kernels.max_rows);
  }
  return rows;
}

void make_codes(const Call& call, int64_t start, int64_t first, int64_t last, char* codes,
                RowScale* scales, int8_t* bytes) {
  for (int64_t row = first; row < last; ++row) {
    char* to = codes + row * call.row_bytes();
    const bool words = call.kernels->words;
    const Quantize q{call.x + (start + row) * call.x_stride,
                     call.dtype,
                     call.k,
                     call.padded(),
                     call.rounding,
                     call.scale,
                     call.zero,
                     words ? bytes : reinterpret_cast<int8_t*>(to),
                     words ? to : nullptr};
    scales[row] = call.kernels->quantize(q);
  }
}

// Store what the sums of m rows from `row` and of `tiles` tiles from `tile` become.
void finish(const Call& call, const Rows& rows, const int32_t* c, int64_t row, int m, int64_t tile,
            int tiles) {
  alignas(64) float numbers[kMaxRows * kMaxTiles * kTile];
  const int64_t width = tiles * kTile;
  const Scale s{c, width, m, static_cast<int>(width), rows.scales + row, call.scales + tile * kTile,
                call.sums == nullptr ? nullptr : call.sums + tile * kTile, numbers};
  call.kernels->scale(s);
  const int64_t unit = call.tiles_per_feature;
  const int64_t feature = tile / unit * kTile, line = rows.start + row;
  const int64_t in_bytes = item_bytes(call.dtype), out_bytes = item_bytes(call.out_dtype);
  Finish f{};
  f.c = numbers;
  f.rows = m;
  f.columns = static_cast<int>(least(call.n - feature, tiles / unit * kTile));
  f.tiles = tiles;
  f.epilogue = call.epilogue;
  if (call.bias != nullptr) {
    f.bias = call.bias + feature * in_bytes;
    f.up_bias = call.bias + (call.n + feature) * in_bytes;
  }
  f.dtype = call.dtype;
  if (call.residual != nullptr)
    f.residual = call.residual + line * call.residual_stride + feature * out_bytes;
  f.residual_stride = call.residual_stride;
  f.out = call.out + line * call.out_stride + feature * out_bytes;
  f.out_stride = call.out_stride;
  f.out_dtype = call.out_dtype;
  call.kernels->finish(f);
}

// Compute one block of sums of `tiles` tiles, at once or, where a path has no block as wide, one by one.
void run_block(const Kernels& kernels, const Block& block, int m, int tiles) {
  if (tiles <= kernels.max_tiles[m]) {
    kernels.micro[m][tiles](block);
    return;
  }
  for (int t = 0; t < tiles; ++t) {
    Block one = block;
    one.b += t * block.b_stride;
    one.c += t * kTile;
    kernels.micro[m][1](one);
  }
}

// The tiles first..last: column groups, blocks of k, row groups, from the outside in. The tiles of a
// column group are read side by side: several streams come faster from memory than one.
void run_tiles(const Call& call, const Rows& rows, int32_t* c, int64_t first, int64_t last) {
  const Kernels& kernels = *call.kernels;
  const int64_t groups = rows.groups, most = kernels.max_tiles[rows.group_rows()];
  const int64_t unit = call.tiles_per_feature;  // both tiles of a gated pair are in one group
  const int64_t widest = most < unit ? unit : most / unit * unit;
  const int64_t units = (last - first) / unit, columns = ceil_div(units, widest / unit);
  const int64_t steps = ceil_div(call.k_tiles, kTilesOfK);
  const int64_t b_stride = call.k_tiles * kTileBytes, step_bytes = call.kernels->words ? 128 : 64;
  if (kernels.begin != nullptr) kernels.begin(rows.padded());
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t tile = first + part_start(units, columns, column) * unit;
    const int64_t end = first + part_start(units, columns, column + 1) * unit;
    const int tiles = static_cast<int>(end - tile);
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t kt = part_start(call.k_tiles, steps, step);
      const int64_t k_tiles = part_start(call.k_tiles, steps, step + 1) - kt;
      // Past the end of k comes the next column group.
      const int64_t ahead =
          step + 1 < steps ? k_tiles * kTileBytes : tiles * b_stride - kt * kTileBytes;
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t row = rows.group_start(group);
        const int m = static_cast<int>(rows.group_start(group + 1) - row);
        int32_t* sums = c + (steps == 1 ? 0 : row * tiles * kTile);
        const Block block{rows.codes + row * call.row_bytes() + kt * step_bytes,
                          call.row_bytes(),
                          call.packed + tile * b_stride + kt * kTileBytes,
                          b_stride,
                          k_tiles,
                          sums,
                          tiles * kTile,
                          step > 0,
                          ahead,
                          part_start(k_tiles, groups, group),
                          part_start(k_tiles, groups, group + 1)};
        run_block(kernels, block, m, tiles);
        if (step + 1 == steps) {
          const int exist = static_cast<int>(least(m, rows.count - row));
          finish(call, rows, sums, row, exist, tile, tiles);
        }
      }
    }
  }
  if (kernels.end != nullptr) kernels.end();
}

void run_chunk(const Call& call, Scratch& scratch, int64_t start, int64_t count) {
  const int64_t threads = num_threads();
  Rows rows = make_rows(*call.kernels, start, count);
  const int64_t codes_bytes = rows.padded() * call.row_bytes();
  const int64_t scales_bytes = ceil_div(count * int64_t{sizeof(RowScale)}, 64) * 64;
  const int64_t own_bytes = call.kernels->words ? ceil_div(call.padded(), 64) * 64 : 0;
  const int64_t c_rows = call.k_tiles > kTilesOfK ? rows.padded() : int64_t{kMaxRows};
  const int64_t c_ints = c_rows * kMaxTiles * kTile;
  char* codes = static_cast<char*>(scratch.get(codes_bytes + scales_bytes + threads * own_bytes +
                                               threads * c_ints * int64_t{sizeof(int32_t)}));
  RowScale* scales = reinterpret_cast<RowScale*>(codes + codes_bytes);
  char* bytes = codes + codes_bytes + scales_bytes;
  int32_t* c = reinterpret_cast<int32_t*>(bytes + threads * own_bytes);
  const auto make = [&](int64_t first, int64_t last) {
    make_codes(call, start, first, last, codes, scales,
               reinterpret_cast<int8_t*>(bytes + part_index() * own_bytes));
  };
  if (count * call.k <= kSerialCodes) {
    make_codes(call, start, 0, count, codes, scales, reinterpret_cast<int8_t*>(bytes));
  } else {
    parallel_for(count, 8, make);
  }
  // Rows that fill up the last group: nobody looks at their sums.
  std::memset(codes + count * call.row_bytes(), 0,
              static_cast<size_t>((rows.padded() - count) * call.row_bytes()));
  rows.codes = codes;
  rows.scales = scales;
  parallel_for(call.n_tiles, call.tiles_per_feature, [&](int64_t first, int64_t last) {
    run_tiles(call, rows, c + part_index() * c_ints, first, last);
  });
}

// Write 16 rows of codes, each `stride` bytes, of which `rows` exist, as tiles along k.
void pack_tiles(const int8_t* codes, int64_t rows, int64_t k, int64_t stride, char* stream) {
  const int64_t k_tiles = ceil_div(k, kTileDepth);
  for (int64_t kt = 0; kt < k_tiles; ++kt) {
    const int64_t bytes = least(kTileDepth, k - kt * kTileDepth);
    char* tile = stream + kt * kTileBytes;
    for (int64_t i = 0; i < kTile; ++i) {
      uint32_t line[16] = {};
      if (i < rows) std::memcpy(line, codes + i * stride + kt * kTileDepth, static_cast<size_t>(bytes));
      for (int r = 0; r < 16; ++r) {
        // Adding 128 to each byte: carries do not leave it.
        const uint32_t shifted = line[r] ^ 0x80808080u;
        std::memcpy(tile + r * 64 + i * 4, &shifted, 4);
      }
    }
  }
}

float widen(float x) { return x; }
float widen(bf16 x) { return to_float(x); }

template <class T>
bool quantize_weights(const T* row, int64_t k, float* scale, int8_t* codes) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: leaves a whole number in the low bits
  constexpr float kLargest = 3.4028234663852886e38f;
  float high = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < k; ++i) {
    const float size = __builtin_fabsf(widen(row[i]));
    finite &= size <= kLargest;
    high = size > high ? size : high;
  }
  *scale = high / 127.0f;
  for (int64_t i = 0; i < k; ++i) {
    float v = *scale > 0.0f ? widen(row[i]) / *scale : 0.0f;
    v = v < -127.0f ? -127.0f : (v > 127.0f ? 127.0f : v);
    const float sum = v + kRound;
    uint32_t bits;
    std::memcpy(&bits, &sum, sizeof bits);
    codes[i] = static_cast<int8_t>(bits & 0xffu);
  }
  return finite;
}

void check_pack(const char* op, int64_t rows, int64_t k, int64_t stride, uintptr_t packed,
                int64_t tile_first, int64_t tile_step) {
  check(rows >= 0 && k >= 1, op, "weight", "must be [rows >= 0, k >= 1]");
  check(k <= kMostK, op, "k", "must be at most 65536");
  check(stride >= k || rows <= 1, op, "stride", "must be at least k");
  check(tile_first >= 0 && tile_step >= 1, op, "tiles", "must begin at 0 or later");
  check(packed % 64 == 0 && packed != 0, op, "packed", "must lie on 64 bytes");
}

}  // namespace

void pack_int8(uintptr_t codes, int64_t rows, int64_t k, int64_t stride, uintptr_t scales,
               uintptr_t packed, uintptr_t packed_scales, uintptr_t sums, int64_t tile_first,
               int64_t tile_step) {
  check_pack("pack_int8", rows, k, stride, packed, tile_first, tile_step);
  const int8_t* from = reinterpret_cast<const int8_t*>(codes);
  const float* given = reinterpret_cast<const float*>(scales);
  const int64_t k_bytes = ceil_div(k, kTileDepth) * kTileBytes;
  parallel_for(ceil_div(rows, kTile), 1, [=](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t at = tile_first + tile * tile_step, row = tile * kTile;
      const int64_t here = least(kTile, rows - row);
      pack_tiles(from + row * stride, here, k, stride, reinterpret_cast<char*>(packed) + at * k_bytes);
      float* to = reinterpret_cast<float*>(packed_scales) + at * kTile;
      for (int64_t i = 0; i < kTile; ++i) to[i] = i < here ? given[row + i] : 0.0f;
      if (sums == 0) continue;
      int32_t* total = reinterpret_cast<int32_t*>(sums) + at * kTile;
      for (int64_t i = 0; i < kTile; ++i) {
        total[i] = 0;
        for (int64_t j = 0; i < here && j < k; ++j) total[i] += from[(row + i) * stride + j];
      }
    }
  });
}

void quantize_int8(uintptr_t weight, int64_t rows, int64_t k, int64_t stride, int dtype,
                   uintptr_t packed, uintptr_t packed_scales, int64_t tile_first,
                   int64_t tile_step) {
  check_dtype(dtype, "quantize_int8");
  check_pack("quantize_int8", rows, k, stride, packed, tile_first, tile_step);
  const int64_t k_bytes = ceil_div(k, kTileDepth) * kTileBytes;
  const int64_t item = item_bytes(dtype);
  std::atomic<bool> finite{true};
  parallel_for(ceil_div(rows, kTile), 1, [&](int64_t first, int64_t last) {
    std::vector<int8_t> codes(static_cast<size_t>(kTile * k));
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t at = tile_first + tile * tile_step, row = tile * kTile;
      const int64_t here = least(kTile, rows - row);
      float* scales = reinterpret_cast<float*>(packed_scales) + at * kTile;
      for (int64_t i = 0; i < kTile; ++i) {
        scales[i] = 0.0f;
        if (i >= here) continue;
        const char* from = reinterpret_cast<const char*>(weight) + (row + i) * stride * item;
        const bool good =
            dtype == 0
                ? quantize_weights(reinterpret_cast<const float*>(from), k, scales + i, &codes[i * k])
                : quantize_weights(reinterpret_cast<const bf16*>(from), k, scales + i, &codes[i * k]);
        if (!good) finite.store(false, std::memory_order_relaxed);
      }
      pack_tiles(codes.data(), here, k, k, reinterpret_cast<char*>(packed) + at * k_bytes);
    }
  });
  check(finite.load(), "quantize_int8", "weight", "must be finite");
}

void linear_int8_rows(uintptr_t ids, int64_t count, uintptr_t packed, uintptr_t scales, int64_t n,
                      int64_t k, uintptr_t out, int dtype) {
  check_dtype(dtype, "linear_int8_rows");
  check(n >= 1 && k >= 1 && count >= 0, "linear_int8_rows", "sizes", "must be positive");
  const int64_t k_bytes = ceil_div(k, kTileDepth) * kTileBytes;
  const int64_t* rows = reinterpret_cast<const int64_t*>(ids);
  for (int64_t i = 0; i < count; ++i)
    check(rows[i] >= 0 && rows[i] < n, "linear_int8_rows", "ids", "must be rows of the matrix");
  parallel_for(count, 16, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const unsigned char* codes = reinterpret_cast<const unsigned char*>(packed) +
                                   rows[i] / kTile * k_bytes + rows[i] % kTile * 4;
      const float scale = reinterpret_cast<const float*>(scales)[rows[i]];
      for (int64_t j = 0; j < k; ++j) {
        const float x = static_cast<float>(codes[j / 4 * 64 + j % 4] - 128) * scale;
        if (dtype == 0)
          reinterpret_cast<float*>(out)[i * k + j] = x;
        else
          reinterpret_cast<bf16*>(out)[i * k + j] = to_bf16(x);
      }
    }
  });
}

void linear_int8(uintptr_t x, int64_t x_stride, int64_t m, int dtype, int rounding, float scale,
                 int zero, uintptr_t packed, uintptr_t scales, uintptr_t sums, int64_t n, int64_t k,
                 uintptr_t bias, uintptr_t residual, int64_t residual_stride, uintptr_t out,
                 int64_t out_stride, int out_dtype, int epilogue) {
  constexpr const char* kOp = "linear_int8";
  check_dtype(dtype, kOp);
  check_dtype(out_dtype, kOp);
  check(m >= 0 && n >= 1 && k >= 1, kOp, "sizes", "must be m >= 0, n >= 1, k >= 1");
  check(k <= kMostK, kOp, "k", "must be at most 65536");
  check(m <= 1 || (x_stride >= k && out_stride >= n), kOp, "strides",
        "must be at least the row's length");
  check(packed % 64 == 0 && packed != 0, kOp, "packed", "must lie on 64 bytes");
  check(scales != 0, kOp, "scales", "must not be null");
  check(epilogue >= 0 && epilogue <= 2, kOp, "epilogue", "must be 0, 1 or 2");
  check(rounding >= 0 && rounding <= 2, kOp, "rounding", "must be 0, 1 or 2");
  const Rounding how = static_cast<Rounding>(rounding);
  check(how != Rounding::fixed || (scale > 0.0f && scale <= 3.4e38f), kOp, "scale",
        "must be positive and finite");
  check(zero >= -128 && zero <= 127, kOp, "zero", "must be from -128 to 127");
  const bool zeros = how == Rounding::per_row_zero || (how == Rounding::fixed && zero != 0);
  check(!zeros || sums != 0, kOp, "sums", "must be there where activations have zero points");
  if (m == 0) return;
  check(x != 0 && out != 0, kOp, "x and out", "must not be null");
  const int unit = epilogue == 0 ? 1 : 2;
  const Call call{pick(kTable)(),
                  reinterpret_cast<const char*>(x),
                  x_stride * item_bytes(dtype),
                  dtype,
                  how,
                  scale,
                  zero,
                  reinterpret_cast<const char*>(packed),
                  reinterpret_cast<const float*>(scales),
                  reinterpret_cast<const int32_t*>(sums),
                  n,
                  ceil_div(n, kTile) * unit,
                  k,
                  ceil_div(k, kTileDepth),
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
  int64_t most = call.kernels->cache_bytes / call.row_bytes();
  if (most < call.kernels->least_chunk_rows) most = call.kernels->least_chunk_rows;
  most = least(least(most, kMaxChunkRows), kScratchBytes / call.row_bytes()) / group * group;
  if (most < call.kernels->alone_rows) most = call.kernels->alone_rows;
  const int64_t chunks = ceil_div(m, most);
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t row = part_start(m, chunks, i);
    run_chunk(call, scratch, row, part_start(m, chunks, i + 1) - row);
  }
}

int64_t linear_int8_scratch_bytes() {
  const int64_t sums = kMaxChunkRows * kMaxTiles * kTile * static_cast<int64_t>(sizeof(int32_t));
  return Scratch::taken(kScratchBytes + kMaxChunkRows * static_cast<int64_t>(sizeof(RowScale)) +
                        num_threads() * (kMostK + sums));
}

double peak_int8_ops(int64_t rounds) {
  check(rounds >= 0, "peak_int8_ops", "rounds", "must not be negative");
  const Kernels* kernels = pick(kTable)();
  const int64_t threads = num_threads();
  double one = 0.0;
  parallel_for(threads, 1, [&](int64_t first, int64_t) {
    const double done = kernels->peak(rounds);
    if (first == 0) one = done;
  });
  return one * static_cast<double>(threads);
}

}  // namespace pagemill
