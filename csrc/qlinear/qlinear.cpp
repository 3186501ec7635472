#include "qlinear/qlinear.h"

#include <cstring>

#include "common/dispatch.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "common/sizes.h"
#include "linear/linear.h"
#include "qlinear/qlinear_kernels.h"

namespace pagemill {
namespace {

using namespace qlinear_detail;

// Activations of as many rows at once as fit, so that they stay in the outer caches while the weights
// stream past them.
constexpr int64_t kScratchBytes = int64_t{8} << 20;
constexpr int64_t kMaxChunkRows = 256;
// Tiles whose sums wait in the second cache while a block of k of the activations stays there.
constexpr int64_t kPanelTiles = 12;
constexpr int64_t kStoredTiles = 4;  // of one row together: an epilogue a tile would cost too much
constexpr int64_t kStepHalves = 16;  // of K in one block: its decoded numbers stay in the inner caches
// Below this many numbers the copy of activations is done before other threads are woken.
constexpr int64_t kSerialCopy = 1 << 16;

using KernelsFn = const Kernels* (*)();
constexpr Table<KernelsFn> kTable = {{portable_kernels, PAGEMILL_IF_AVX2(avx2_kernels),
                                      PAGEMILL_IF_AVX512(avx512_kernels),
                                      PAGEMILL_IF_AVX512_BF16(avx512_bf16_kernels), nullptr}};

int64_t align(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

struct Call {
  const QMatrix* matrix;
  const Kernels* kernels;
  const char* x;
  int64_t x_stride;  // bytes
  int dtype;
  int pairs;  // 1: activations and decoded codes are bfloat16 pairs, 0: float32
  const char *bias, *residual;
  int64_t residual_stride;  // bytes
  char* out;
  int64_t out_stride;  // bytes
  int out_dtype;
  int epilogue;
  int unit;  // tiles that belong together: 2 for gated epilogues

  int64_t halves() const { return matrix->k_tiles * 2; }
  int64_t half_bytes() const { return kHalf * (pairs ? 2 : 4); }  // of one row's activations
  int64_t decoded_bytes() const { return kTile * half_bytes(); }   // of half a tile
};

// The rows of one chunk and where their activations lie: blocks of k, each [rows][step halves].
struct Rows {
  int64_t start, count;
  const char* a;
  int64_t step;         // halves in a block of k
  const float* x_sums;  // [rows][groups], or null
};

// Memory that one thread computes in.
struct Room {
  float *totals, *partial;  // [column groups of a panel][rows][tiles of the group * kTile]
  char* decoded;            // [kMaxFinishTiles][a block of k]
};

// The sum of numbers in one fixed order: eight sums side by side, then those.
template <typename Get>
float sum(int64_t count, const Get& get) {
  float s[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (int j = 0; j < 8; ++j) s[j] += get(i + j);
  for (int j = 0; i + j < count; ++j) s[j] += get(i + j);
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

void sum_groups(const Call& call, const char* x, float* to) {
  const QMatrix& matrix = *call.matrix;
  const int64_t group = matrix.group_halves * kHalf;
  for (int64_t g = 0; g < matrix.groups; ++g) {
    const int64_t k = g * group, count = least(matrix.k - k, group);
    if (is_float(call.dtype)) {
      const float* from = reinterpret_cast<const float*>(x) + k;
      to[g] = sum(count, [=](int64_t i) { return from[i]; });
    } else {
      const bf16* from = reinterpret_cast<const bf16*>(x) + k;
      to[g] = sum(count, [=](int64_t i) { return to_float(from[i]); });
    }
  }
}

// Copy one row into its slots, with zeros past k.
void copy_row(const Call& call, const Rows& rows, int64_t row, const char* x, char* to) {
  const int64_t k = call.matrix->k, slot = rows.step * call.half_bytes();
  for (int64_t first = 0, block = 0; first < call.halves(); first += rows.step, ++block) {
    char* a = to + (block * rows.count + row) * slot;
    const int64_t begin = first * kHalf;
    const int64_t all = least(rows.step, call.halves() - first) * kHalf;
    const int64_t there = least(all, k - begin);
    if (call.pairs || is_float(call.dtype)) {
      const int64_t item = item_bytes(call.dtype);
      std::memcpy(a, x + begin * item, static_cast<size_t>(there * item));
      std::memset(a + there * item, 0, static_cast<size_t>((all - there) * item));
    } else {
      const bf16* from = reinterpret_cast<const bf16*>(x) + begin;
      float* wide = reinterpret_cast<float*>(a);
      for (int64_t i = 0; i < there; ++i) wide[i] = to_float(from[i]);
      for (int64_t i = there; i < all; ++i) wide[i] = 0.0f;
    }
  }
}

// The function that takes a row alone through one tile, or null.
MicroFn alone(const Call& call, const Rows& rows) {
  const bool fits = rows.count == 1 && call.matrix->group_halves <= kAloneHalves;
  return fits ? call.kernels->alone[call.matrix->codec][call.pairs] : nullptr;
}

// Compute one block of sums, `widest` tiles at a time and what is left one by one.
void run_block(const Call& call, MicroFn const (&fns)[2], Block block, int64_t tiles,
               int64_t widest) {
  while (tiles > 0) {
    const int64_t now = tiles >= widest ? widest : 1;
    fns[now == widest ? 1 : 0](block);
    tiles -= now;
    block.b += now * block.b_stride;
    block.scales += now * call.matrix->groups * kTile;
    if (block.offsets != nullptr) block.offsets += now * call.matrix->groups * kTile;
    block.totals += now * kTile;
    if (block.partial != nullptr) block.partial += now * kTile;
  }
}

// Store what the sums of m rows from `row` (of the chunk) and of `tiles` tiles from `tile` become.
void finish(const Call& call, const Rows& rows, float* c, int64_t row, int m, int64_t tile,
            int64_t tiles) {
  const QMatrix& matrix = *call.matrix;
  const float* multipliers = matrix.multipliers + tile * kTile;
  const int64_t width = tiles * kTile;
  for (int i = 0; i < m; ++i)
    for (int64_t j = 0; j < width; ++j) c[i * width + j] *= multipliers[j];
  const int64_t feature = tile / call.unit * kTile;
  const int64_t in_bytes = item_bytes(call.dtype), out_bytes = item_bytes(call.out_dtype);
  Finish f{};
  f.c = c;
  f.rows = m;
  f.columns = static_cast<int>(least(matrix.n - feature, tiles / call.unit * kTile));
  f.tiles = static_cast<int>(tiles);
  f.epilogue = call.epilogue;
  if (call.bias != nullptr) {
    f.bias = call.bias + feature * in_bytes;
    f.up_bias = call.bias + (matrix.n + feature) * in_bytes;
  }
  f.dtype = call.dtype;
  if (call.residual != nullptr) {
    f.residual = call.residual + (rows.start + row) * call.residual_stride + feature * out_bytes;
  }
  f.residual_stride = call.residual_stride;
  f.out = call.out + (rows.start + row) * call.out_stride + feature * out_bytes;
  f.out_stride = call.out_stride;
  f.out_dtype = call.out_dtype;
  call.kernels->finish(f);
}

// One block of k of a column group, for all rows of the chunk.
struct Part {
  int64_t tile, tiles;
  int64_t first, halves;    // of k
  float *totals, *partial;  // of the column group
};

void run_part(const Call& call, const Rows& rows, const Room& room, const Part& part,
              bool direct) {
  const QMatrix& matrix = *call.matrix;
  const Kernels& kernels = *call.kernels;
  const int64_t code_stride = call.halves() * matrix.half_bytes;
  const char* b = matrix.codes + part.tile * code_stride + part.first * matrix.half_bytes;
  int64_t b_stride = code_stride;
  if (!direct) {
    b_stride = part.halves * call.decoded_bytes();
    for (int64_t t = 0; t < part.tiles; ++t) {
      kernels.unpack[matrix.codec][call.pairs](matrix, b + t * code_stride, part.halves,
                                               room.decoded + t * b_stride);
    }
    b = room.decoded;
  }
  const int64_t group = part.first / matrix.group_halves;
  const int64_t scale = (part.tile * matrix.groups + group) * kTile;
  const int64_t into_group = part.first % matrix.group_halves;
  const int64_t slot = rows.step * call.half_bytes(), width = part.tiles * kTile;
  if (part.first == 0)
    std::memset(part.totals, 0, static_cast<size_t>(rows.count * width) * sizeof(float));
  const char* a = rows.a + part.first / rows.step * rows.count * slot;
  const int64_t most = (direct ? kernels.direct_rows : kernels.max_rows)[call.pairs];
  const int64_t groups = ceil_div(rows.count, most);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t row = part_start(rows.count, groups, g);
    const int m = static_cast<int>(part_start(rows.count, groups, g + 1) - row);
    const Block block{&matrix,
                      a + row * slot,
                      slot,
                      b,
                      b_stride,
                      matrix.scales + scale,
                      matrix.offsets == nullptr ? nullptr : matrix.offsets + scale,
                      rows.x_sums == nullptr ? nullptr : rows.x_sums + row * matrix.groups + group,
                      part.halves,
                      least(matrix.group_halves - into_group, call.halves() - part.first),
                      into_group != 0,
                      part.totals + row * width,
                      part.partial == nullptr ? nullptr : part.partial + row * width,
                      width,
                      call.halves() - part.first};
    if (const MicroFn fn = alone(call, rows)) {
      const MicroFn fns[2] = {fn, fn};
      run_block(call, fns, block, part.tiles, 1);
    } else if (direct) {
      run_block(call, kernels.direct[matrix.codec][call.pairs][m], block, part.tiles,
                kernels.direct_tiles[call.pairs][m]);
    } else {
      run_block(call, kernels.decoded[call.pairs][m], block, part.tiles,
                kernels.decoded_tiles[call.pairs]);
    }
    if (part.first + part.halves == call.halves())
      finish(call, rows, part.totals + row * width, row, m, part.tile, part.tiles);
  }
}

// The tiles first..last: panels of column groups, blocks of k, column groups, row groups, from the
// outside in.
void run_tiles(const Call& call, const Rows& rows, const Room& room, int64_t first, int64_t last) {
  const Kernels& kernels = *call.kernels;
  const bool direct = rows.count <= kernels.direct_rows[call.pairs];
  const int64_t widest = direct ? kernels.direct_tiles[call.pairs][rows.count]
                                : kernels.decoded_tiles[call.pairs];
  // Both tiles of a gated pair are in one group; a row alone stores several tiles at once.
  int64_t group = widest % call.unit == 0 ? widest : widest * call.unit;
  if (alone(call, rows) != nullptr) group = kStoredTiles;
  const int64_t panel = direct ? group : kPanelTiles / group * group;
  for (int64_t begin = first; begin < last; begin += panel) {
    const int64_t end = least(begin + panel, last);
    for (int64_t half = 0; half < call.halves(); half += rows.step) {
      for (int64_t tile = begin; tile < end; tile += group) {
        const int64_t at = (tile - begin) * kTile * rows.count;
        const Part part{tile,
                        least(group, end - tile),
                        half,
                        least(rows.step, call.halves() - half),
                        room.totals + at,
                        room.partial == nullptr ? nullptr : room.partial + at};
        run_part(call, rows, room, part, direct);
      }
    }
  }
}

// How the memory of a chunk is laid out, in bytes.
struct Sizes {
  int64_t a, x_sums, totals, partial, decoded;

  int64_t room() const { return totals + partial + decoded; }
};

Sizes sizes_of(const Call& call, int64_t rows, int64_t step, bool in_place) {
  const QMatrix& matrix = *call.matrix;
  const int64_t steps = ceil_div(call.halves(), step);
  Sizes s{};
  s.a = in_place ? 0 : align(steps * rows * step * call.half_bytes());
  s.x_sums = matrix.offset == 0 ? 0 : align(rows * matrix.groups * 4);
  s.totals = align(rows * kPanelTiles * kTile * 4);
  // Groups that lie across the edges of blocks.
  s.partial = steps > 1 && step % matrix.group_halves != 0 ? s.totals : 0;
  s.decoded = rows <= call.kernels->direct_rows[call.pairs]
                  ? 0
                  : align(kMaxFinishTiles * step * call.decoded_bytes());
  return s;
}

void run_chunk(const Call& call, Scratch& scratch, int64_t start, int64_t count) {
  const QMatrix& matrix = *call.matrix;
  // One row needs no blocks of k, and in its own type lies as it should.
  const int64_t step = count == 1 ? call.halves() : kStepHalves;
  const bool in_place =
      count == 1 && matrix.k == call.halves() * kHalf && (call.pairs || is_float(call.dtype));
  const Sizes sizes = sizes_of(call, count, step, in_place);
  char* memory = static_cast<char*>(scratch.get(sizes.a + sizes.x_sums + num_threads() * sizes.room()));
  float* x_sums = sizes.x_sums == 0 ? nullptr : reinterpret_cast<float*>(memory + sizes.a);
  const Rows rows{start, count, in_place ? call.x + start * call.x_stride : memory, step, x_sums};
  const auto copy = [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const char* x = call.x + (start + row) * call.x_stride;
      if (!in_place) copy_row(call, rows, row, x, memory);
      if (x_sums != nullptr) sum_groups(call, x, x_sums + row * matrix.groups);
    }
  };
  if (!in_place || x_sums != nullptr) {
    if (count * matrix.k <= kSerialCopy) {
      copy(0, count);
    } else {
      parallel_for(count, 8, copy);
    }
  }
  char* rooms = memory + sizes.a + sizes.x_sums;
  parallel_for(matrix.n_tiles, call.unit, [&](int64_t first, int64_t last) {
    char* own = rooms + part_index() * sizes.room();
    const Room room{reinterpret_cast<float*>(own),
                    sizes.partial == 0 ? nullptr : reinterpret_cast<float*>(own + sizes.totals),
                    own + sizes.totals + sizes.partial};
    run_tiles(call, rows, room, first, last);
  });
}

}  // namespace

QMatrix::QMatrix(int codec_, int64_t group, int64_t n_, int64_t k_, int parts_, uintptr_t codes_,
                 uintptr_t scales_, uintptr_t offsets_, int offset_, uintptr_t multipliers_,
                 const std::vector<int>& table)
    : codec(codec_),
      offset(offset_),
      parts(parts_),
      n(n_),
      k(k_),
      n_tiles(ceil_div(n_, kTile) * parts_),
      k_tiles(ceil_div(k_, 32)),
      half_bytes(codec_ == 0 ? 128 : 256),
      group_halves(0),
      groups(0),
      codes(reinterpret_cast<const char*>(codes_)),
      scales(reinterpret_cast<const uint16_t*>(scales_)),
      offsets(reinterpret_cast<const uint16_t*>(offsets_)),
      multipliers(reinterpret_cast<const float*>(multipliers_)),
      pairs{},
      wide{},
      bytes{} {
  check(codec >= 0 && codec < kCodecs, "QMatrix", "codec", "must be 0, 1 or 2");
  check(offset >= 0 && offset <= 2, "QMatrix", "offset", "must be 0, 1 or 2");
  check((offset != 0) == (offsets_ != 0), "QMatrix", "offsets", "must be there as `offset` says");
  check(parts == 1 || parts == 2, "QMatrix", "parts", "must be 1 or 2");
  check(n >= 1 && k >= 1, "QMatrix", "sizes", "must be n >= 1, k >= 1");
  check(group == 16 || (group > 0 && group % 32 == 0) || group >= k, "QMatrix", "group",
        "must be 16, a multiple of 32, or k");
  check(codes_ % 64 == 0 && codes_ != 0, "QMatrix", "codes", "must lie on 64 bytes");
  check(scales_ != 0 && multipliers_ != 0, "QMatrix", "scales", "must not be null");
  check(table.size() == (codec == 0 ? 16u : 0u), "QMatrix", "table",
        "must have 16 numbers for codes of 4 bits, else none");
  group_halves = group >= k ? k_tiles * 2 : group / kHalf;
  groups = ceil_div(k_tiles * 2, group_halves);
  for (size_t i = 0; i < table.size(); ++i) {
    check(table[i] >= -128 && table[i] <= 127, "QMatrix", "table", "must hold signed bytes");
    bytes[i] = static_cast<int8_t>(table[i]);
    wide[i] = static_cast<float>(table[i]);
    pairs[i] = pairs[i + 16] = to_bf16(wide[i]);
  }
}

void qlinear(const QMatrix& matrix, uintptr_t x, int64_t x_stride, int64_t m, int dtype,
             uintptr_t bias, uintptr_t residual, int64_t residual_stride, uintptr_t out,
             int64_t out_stride, int out_dtype, int epilogue) {
  check_dtype(dtype, "qlinear");
  check_dtype(out_dtype, "qlinear");
  check(m >= 0, "qlinear", "rows", "must be at least 0");
  check(m <= 1 || (x_stride >= matrix.k && out_stride >= matrix.n), "qlinear", "strides",
        "must be at least the row's length");
  check(epilogue >= 0 && epilogue <= 2, "qlinear", "epilogue", "must be 0, 1 or 2");
  check((epilogue == 0 ? 1 : 2) == matrix.parts, "qlinear", "epilogue",
        "must be a gated one for a matrix of two parts and for no other");
  if (m == 0) return;
  check(x != 0 && out != 0, "qlinear", "x and out", "must not be null");
  const Kernels* kernels = pick(kTable)();
  const Call call{&matrix,
                  kernels,
                  reinterpret_cast<const char*>(x),
                  x_stride * item_bytes(dtype),
                  dtype,
                  kernels->pairs && !is_float(dtype) ? 1 : 0,
                  reinterpret_cast<const char*>(bias),
                  reinterpret_cast<const char*>(residual),
                  residual_stride * item_bytes(out_dtype),
                  reinterpret_cast<char*>(out),
                  out_stride * item_bytes(out_dtype),
                  out_dtype,
                  epilogue,
                  matrix.parts};
  thread_local Scratch scratch;
  const int64_t group = kernels->max_rows[call.pairs];
  const int64_t fitting = kScratchBytes / (call.halves() * call.half_bytes());
  int64_t most = least(kMaxChunkRows, fitting) / group * group;
  if (most < group) most = group;
  const int64_t chunks = ceil_div(m, most);
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t row = part_start(m, chunks, i);
    run_chunk(call, scratch, row, part_start(m, chunks, i + 1) - row);
  }
}

int64_t qlinear_scratch_bytes() {
  const int64_t sums = 2 * kMaxChunkRows * kPanelTiles * kTile * 4;
  const int64_t decoded = kMaxFinishTiles * kStepHalves * kHalf * kTile * 4;
  // Sums of x: one for every 16 numbers at most.
  return Scratch::taken(kScratchBytes + kScratchBytes / 8 + num_threads() * (sums + decoded));
}

}  // namespace pagemill
