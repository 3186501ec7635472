// Activations as the inner loops read them: one stream from the first to the last. Rows read where the
// caller has them lie a power of two apart and push each other out of the first cache.
#include <cstring>

#include "linear/linear_work.h"

namespace pagemill::linear_detail {
namespace {

// Two numbers that stay together.
struct Pair {
  bf16 first, second;
};

// One block of k of one group: to[padded][m] numbers, zeros past `whole`.
template <class From, class To, class Convert>
void interleave(const char* const* x, int64_t m, int64_t whole, int64_t padded, To* to,
                const Convert& convert) {
  for (int64_t k = 0; k < whole; ++k)
    for (int64_t i = 0; i < m; ++i) *to++ = convert(reinterpret_cast<const From*>(x[i]) + k);
  for (int64_t j = (padded - whole) * m; j > 0; --j) *to++ = To{};
}

// Pairs of two rows, one of each in turn, which go on `step` pairs further on. A word's lower half lies
// first in memory, as everywhere here.
void zip_rows(const char* x, const char* y, int64_t pairs, int64_t step, Pair* to) {
  constexpr uint64_t kLower = 0xffffffffu;
  int64_t k = 0;
  for (; k + 2 <= pairs; k += 2, to += 2 * step) {
    uint64_t a, b;
    std::memcpy(&a, x + k * 4, 8);
    std::memcpy(&b, y + k * 4, 8);
    const uint64_t first = (a & kLower) | (b << 32), second = (a >> 32) | (b & ~kLower);
    std::memcpy(to, &first, 8);
    std::memcpy(to + step, &second, 8);
  }
  if (k == pairs) return;
  std::memcpy(to, x + k * 4, 4);
  std::memcpy(to + 1, y + k * 4, 4);
}

// One block of k of one group of rows: to[padded / 2][m] pairs, zeros past `whole`.
void copy_pairs(const char* const* x, int64_t m, int64_t whole, int64_t padded, Pair* to) {
  const int64_t pairs = whole / 2;
  int64_t i = 0;
  for (; i + 2 <= m; i += 2) zip_rows(x[i], x[i + 1], pairs, m, to + i);
  for (int64_t k = 0; i < m && k < pairs; ++k) std::memcpy(to + k * m + i, x[i] + k * 4, 4);
  const size_t rest = static_cast<size_t>((padded / 2 - pairs) * m);
  if (rest > 0) std::memset(to + pairs * m, 0, rest * sizeof(Pair));
  for (i = 0; whole % 2 != 0 && i < m; ++i)
    std::memcpy(&to[pairs * m + i].first, x[i] + (whole - 1) * 2, 2);
}

// One block of k of `unit` rows, of which `m` exist: to[k tiles][unit][64 bytes].
void copy_tiles(const char* const* x, int64_t m, int64_t unit, int64_t bytes, int64_t k_tiles,
                char* to) {
  for (int64_t i = 0; i < unit; ++i) {
    for (int64_t kt = 0; kt < k_tiles; ++kt) {
      char* line = to + (kt * unit + i) * 64;
      const int64_t here = i < m ? least(64, bytes - kt * 64) : 0;
      if (here < 64) std::memset(line, 0, 64);
      if (here > 0) std::memcpy(line, x[i] + kt * 64, static_cast<size_t>(here));
    }
  }
}

}  // namespace

void copy_activations(const Call& call, const Rows& rows, int64_t first, int64_t last, char* to) {
  const int64_t depth = tile_depth(call.dtype), item = item_bytes(call.dtype);
  const int64_t end = rows.group_start(last);
  const bool in_tiles = call.kernels->row_unit > 1;
  for (int64_t group = first, row = rows.group_start(first); row < end;) {
    // Tiles of a group follow one another as groups do.
    const int64_t m = in_tiles ? rows.unit : rows.group_start(++group) - row;
    const char* x[kMaxRows];
    const int64_t exist = least(m, rows.count - row);
    for (int64_t step = 0; step < call.steps; ++step) {
      const int64_t kt = call.step_start(step), k_tiles = call.step_start(step + 1) - kt;
      const int64_t whole = least(k_tiles * depth, call.k - kt * depth);
      for (int64_t i = 0; i < exist; ++i)
        x[i] = call.x + (rows.start + row + i) * call.x_stride + kt * depth * item;
      char* a = to + group_offset(call, rows, step, row);
      if (in_tiles) {
        copy_tiles(x, exist, m, whole * item, k_tiles, a);
      } else if (is_float(call.dtype)) {
        interleave<float>(x, m, whole, k_tiles * depth, reinterpret_cast<float*>(a),
                          [](const float* p) { return *p; });
      } else if (call.kernels->wide) {
        interleave<bf16>(x, m, whole, k_tiles * depth, reinterpret_cast<float*>(a),
                         [](const bf16* p) { return to_float(*p); });
      } else {
        copy_pairs(x, m, whole, k_tiles * depth, reinterpret_cast<Pair*>(a));
      }
    }
    row += m;
  }
}

}  // namespace pagemill::linear_detail
