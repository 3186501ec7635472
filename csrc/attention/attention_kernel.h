// The attention of one unit, written once over a path's vectors `V` and a kind of numbers `K`; the
// order of every sum is fixed here (see attention.h). Included by the files of instruction sets: all of
// it has internal linkage.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "attention/attention_work.h"

namespace pagemill {
namespace attention_detail {
namespace {

PAGEMILL_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
PAGEMILL_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// float32 caches. A word of a tile is one number.
template <class V>
struct Floats {
  static constexpr int kWidth = 1;  // keys, or elements, of a word
  static constexpr bool kScaled = false;
  struct Operand {
    float x;
  };
  using Split = typename V::F;
  static PAGEMILL_INLINE Split split(typename V::W w) { return V::as_floats(w); }
  static PAGEMILL_INLINE typename V::F fma(const Split& w, const Operand* x, typename V::F sum) {
    return V::fma(w, V::set1(x->x), sum);
  }
  static PAGEMILL_INLINE Operand operand(const float* x) { return {x[0]}; }
  static PAGEMILL_INLINE Operand operand(const bf16* x) { return {to_float(x[0])}; }
  using Weight = float;
  static PAGEMILL_INLINE typename V::F store_weights(Weight* to, typename V::F p) {
    V::store(to, p);
    return p;
  }
};

// bfloat16 caches, two numbers a word, taken apart: products and sums are those of float32.
template <class V>
struct WidePairs {
  static constexpr int kWidth = 2;
  static constexpr bool kScaled = false;
  struct Operand {
    float even, odd;
  };
  struct Split {
    typename V::F even, odd;
  };
  static PAGEMILL_INLINE Split split(typename V::W w) { return {V::low_half(w), V::high_half(w)}; }
  static PAGEMILL_INLINE typename V::F fma(const Split& w, const Operand* x, typename V::F sum) {
    return V::fma(w.odd, V::set1(x->odd), V::fma(w.even, V::set1(x->even), sum));
  }
  static PAGEMILL_INLINE Operand operand(const float* x) { return {x[0], x[1]}; }
  static PAGEMILL_INLINE Operand operand(const bf16* x) { return {to_float(x[0]), to_float(x[1])}; }
  using Weight = float;
  static PAGEMILL_INLINE typename V::F store_weights(Weight* to, typename V::F p) {
    V::store(to, p);
    return p;
  }
};

// bfloat16 caches and queries by dot products of pairs; weights are rounded to bfloat16 and their sum is
// of the rounded ones.
template <class V>
struct DotPairs {
  static constexpr int kWidth = 2;
  static constexpr bool kScaled = false;
  struct Operand {
    bf16 even, odd;
  };
  using Split = typename V::W;
  static PAGEMILL_INLINE Split split(typename V::W w) { return w; }
  static PAGEMILL_INLINE typename V::F fma(const Split& w, const Operand* x, typename V::F sum) {
    uint32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return V::dot(sum, w, V::set1_words(pair));
  }
  static PAGEMILL_INLINE Operand operand(const bf16* x) { return {x[0], x[1]}; }
  static PAGEMILL_INLINE Operand operand(const float* x) { return {to_bf16(x[0]), to_bf16(x[1])}; }
  using Weight = bf16;
  static PAGEMILL_INLINE typename V::F store_weights(Weight* to, typename V::F p) {
    return V::store_bf16(to, p);
  }
};

// int8 caches, four codes a word, widened: products and sums are those of float32. A tile ends in the
// scales of its 16 tokens, which multiply scores and weights.
template <class V>
struct Quads {
  static constexpr int kWidth = 4;
  static constexpr bool kScaled = true;
  struct Operand {
    float x[4];
  };
  struct Split {
    typename V::F x[4];
  };
  static PAGEMILL_INLINE Split split(typename V::W w) {
    return {{V::template code<0>(w), V::template code<1>(w), V::template code<2>(w),
             V::template code<3>(w)}};
  }
  static PAGEMILL_INLINE typename V::F fma(const Split& w, const Operand* x, typename V::F sum) {
    for (int i = 0; i < 4; ++i) sum = V::fma(w.x[i], V::set1(x->x[i]), sum);
    return sum;
  }
  static PAGEMILL_INLINE Operand operand(const float* x) { return {{x[0], x[1], x[2], x[3]}}; }
  static PAGEMILL_INLINE Operand operand(const bf16* x) {
    return {{to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3])}};
  }
  // A row of words of codes to rows of words of `Floats`, `step` bytes apart.
  static constexpr int kRows = 4;
  static PAGEMILL_INLINE void unpack(typename V::W w, char* to, int64_t step) {
    const Split split_words = split(w);
    for (int i = 0; i < kRows; ++i)
      V::store(reinterpret_cast<float*>(to + i * step), split_words.x[i]);
  }
  using Weight = float;
  static PAGEMILL_INLINE typename V::F store_weights(Weight* to, typename V::F p) {
    V::store(to, p);
    return p;
  }
};

// int8 caches and bfloat16 queries by dot products of pairs: codes are whole numbers that bfloat16 holds.
template <class V>
struct DotQuads {
  static constexpr int kWidth = 4;
  static constexpr bool kScaled = true;
  struct Operand {
    bf16 x[4];
  };
  struct Split {
    typename V::W low, high;  // pairs (0, 1) and (2, 3)
  };
  static PAGEMILL_INLINE Split split(typename V::W w) {
    return {V::pack_halves(V::template code<0>(w), V::template code<1>(w)),
            V::pack_halves(V::template code<2>(w), V::template code<3>(w))};
  }
  static PAGEMILL_INLINE typename V::F fma(const Split& w, const Operand* x, typename V::F sum) {
    uint32_t pairs[2];
    std::memcpy(pairs, x, sizeof pairs);
    return V::dot(V::dot(sum, w.low, V::set1_words(pairs[0])), w.high, V::set1_words(pairs[1]));
  }
  static PAGEMILL_INLINE Operand operand(const bf16* x) { return {{x[0], x[1], x[2], x[3]}}; }
  static PAGEMILL_INLINE Operand operand(const float* x) {
    return {{to_bf16(x[0]), to_bf16(x[1]), to_bf16(x[2]), to_bf16(x[3])}};
  }
  using Weight = bf16;
  static PAGEMILL_INLINE typename V::F store_weights(Weight* to, typename V::F p) {
    return V::store_bf16(to, p);
  }
  // A row of words of codes to rows of words of `DotPairs`.
  static constexpr int kRows = 2;
  static PAGEMILL_INLINE void unpack(typename V::W w, char* to, int64_t step) {
    const Split split_words = split(w);
    V::store_words(to, split_words.low);
    V::store_words(to + step, split_words.high);
  }
};

// int8 caches whose tiles `Codes` unpacks to those of `Kind` before they are used: for many rows. The
// sums are those of Codes, bit by bit: both take single codes, or pairs, in the same order.
template <class V, template <class> class Kind, template <class> class Codes>
struct Unpacked : Kind<V> {
  static constexpr bool kScaled = true;
  using Packed = Codes<V>;
};
template <class K, class = void>
struct Unpacking {
  static constexpr bool kNeeded = false;
};
template <class K>
struct Unpacking<K, typename std::enable_if<(sizeof(typename K::Packed) > 0)>::type> {
  static constexpr bool kNeeded = true;
};

// e^x for x <= 0, to one unit in the last place or two: 2^n times a polynomial of the rest, whose
// coefficients minimize the relative error. Also exact 0 for -infinity; NaN stays NaN.
template <class V>
PAGEMILL_INLINE typename V::F exp(typename V::F x) {
  using F = typename V::F;
  x = V::max(V::set1(-104.0f), x);
  const F n = V::round(V::mul(x, V::set1(1.44269504f)));
  F r = V::fma(n, V::set1(-0.693145752f), x);
  r = V::fma(n, V::set1(-1.42860677e-6f), r);
  F q = V::set1(0.0013814596f);
  q = V::fma(q, r, V::set1(0.0083687175f));
  q = V::fma(q, r, V::set1(0.041668389f));
  q = V::fma(q, r, V::set1(0.16666521f));
  q = V::fma(q, r, V::set1(0.49999994f));
  q = V::fma(q, V::mul(r, r), r);
  return V::scale(V::add(q, V::set1(1.0f)), n);
}

template <class V>
PAGEMILL_INLINE typename V::F tanh(typename V::F x) {
  using F = typename V::F;
  const F one = V::set1(1.0f), size = V::abs(x);
  const F e = exp<V>(V::mul(size, V::set1(-2.0f)));
  const F far = V::copy_sign(V::div(V::sub(one, e), V::add(one, e)), x);
  const F z = V::mul(x, x);
  F q = V::set1(-0.005717037f);
  q = V::fma(q, z, V::set1(0.020650579f));
  q = V::fma(q, z, V::set1(-0.053743497f));
  q = V::fma(q, z, V::set1(0.13331491f));
  q = V::fma(q, z, V::set1(-0.33333284f));
  const F near = V::fma(V::mul(q, z), x, x);
  return V::if_less(size, V::set1(0.625f), near, far);
}

// Raw scores of R queries and C tiles of keys: q [elements / width][R] operands, s [R][kSegmentKeys].
// Ahead: fetch as many bytes from each tile of v, which come next and which nobody has touched yet.
template <class V, class K, int R, int C, bool Ahead>
PAGEMILL_INLINE void score_tiles(const typename K::Operand* q, const char* const* k,
                                 const char* const* v, int head_dim, float* s) {
  typename V::F sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = V::zero();
  // Codes are padded to whole words.
  const int words = (K::kWidth == 4 ? head_dim + 3 : head_dim) / K::kWidth;
  for (int i = 0; i < words; ++i) {
    for (int c = 0; c < C; ++c) {
      if (Ahead) __builtin_prefetch(v[c] + i * 64);
      const auto w = K::split(V::load_words(k[c] + i * 64));
      for (int r = 0; r < R; ++r) sums[r][c] = K::fma(w, q + i * R + r, sums[r][c]);
    }
  }
  if (K::kWidth == 2 && head_dim % 2 != 0) {
    for (int c = 0; c < C; ++c) {
      const auto w = K::split(V::load_halves(k[c] + words * 64));
      for (int r = 0; r < R; ++r) sums[r][c] = K::fma(w, q + words * R + r, sums[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) V::store(s + r * kSegmentKeys + c * kTileKeys, sums[r][c]);
}

template <class V, class K, int R, bool Ahead>
void score_rows(const typename K::Operand* q, const char* const* k, const char* const* v, int first,
                int last, int head_dim, float* s) {
  constexpr int kTiles = V::columns(R);
  int t = first;
  for (; t + kTiles <= last; t += kTiles)
    score_tiles<V, K, R, kTiles, Ahead>(q, k + t, v + t, head_dim, s + t * kTileKeys);
  for (; t < last; ++t)
    score_tiles<V, K, R, 1, Ahead>(q, k + t, v + t, head_dim, s + t * kTileKeys);
}

// Add weights times values of words [first, last) of a segment: D vectors of elements from `offset`
// (bytes in a row of a V tile), R rows. p [R][kSegmentKeys] weights; o [R][stride]. Ahead: fetch as many
// bytes from each tile of `next`, the next segment's keys.
template <class V, class K, int R, int D, bool Ahead>
PAGEMILL_INLINE void sum_values(const typename K::Weight* p, const char* const* v,
                                const char* const* next, int first, int last, int64_t row_bytes,
                                int64_t offset, int lanes, float* o, int64_t stride) {
  constexpr int kTileWords = kTileKeys / K::kWidth;
  typename V::F sums[R][D];
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < D; ++d) sums[r][d] = V::load(o + r * stride + d * 16);
  for (int j = first; j < last;) {
    const int end = static_cast<int>(least(last, (j / kTileWords + 1) * kTileWords));
    const char* row = v[j / kTileWords] + (j % kTileWords) * row_bytes + offset;
    const char* fetched = next[j / kTileWords] + (j % kTileWords) * row_bytes + offset;
    for (; j < end; ++j, row += row_bytes, fetched += row_bytes) {
      for (int d = 0; d < D; ++d) {
        if (Ahead) __builtin_prefetch(fetched + d * 64, 0, 2);
        const auto w = K::split(D == 1 ? V::load_words_to(row, lanes) : V::load_words(row + d * 64));
        for (int r = 0; r < R; ++r) {
          const auto* x = reinterpret_cast<const typename K::Operand*>(p + r * kSegmentKeys) + j;
          sums[r][d] = K::fma(w, x, sums[r][d]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < D; ++d) V::store(o + r * stride + d * 16, sums[r][d]);
}

template <class V, class K, int R, bool Ahead>
void sum_rows(const typename K::Weight* p, const char* const* v, const char* const* next, int first,
              int last, int head_dim, float* o, int64_t stride) {
  constexpr int kDims = V::columns(R) < 4 ? V::columns(R) : 4;
  const int64_t row_bytes = head_dim * 4;
  int d = 0;
  for (; d + kDims * 16 <= head_dim; d += kDims * 16)
    sum_values<V, K, R, kDims, Ahead>(p, v, next, first, last, row_bytes, d * 4, 16, o + d, stride);
  if (kDims == 4 && d + 32 <= head_dim) {
    sum_values<V, K, R, 2, Ahead>(p, v, next, first, last, row_bytes, d * 4, 16, o + d, stride);
    d += 32;
  }
  for (; d < head_dim; d += 16)
    sum_values<V, K, R, 1, Ahead>(p, v, next, first, last, row_bytes, d * 4,
                                  static_cast<int>(least(16, head_dim - d)), o + d, stride);
}

// The same for keys [first, last) of one row, of which a word may be cut: the hidden keys' values count
// as 0, whatever stands there.
template <class V, class K>
void sum_few(const typename K::Weight* p, const char* const* v, int first, int last, int head_dim,
             float* o) {
  constexpr int kTileWords = kTileKeys / K::kWidth;
  const int from = first / K::kWidth, to = (last + K::kWidth - 1) / K::kWidth;
  const auto* x = reinterpret_cast<const typename K::Operand*>(p);
  for (int d = 0; d < head_dim; d += 16) {
    const int lanes = static_cast<int>(least(16, head_dim - d));
    typename V::F sum = V::load(o + d);
    for (int j = from; j < to; ++j) {
      constexpr int kBits = 32 / K::kWidth;
      uint32_t seen = 0xffffffffu;
      for (int i = 0; K::kWidth > 1 && i < K::kWidth; ++i)
        if (K::kWidth * j + i < first || K::kWidth * j + i >= last)
          seen &= ~(((uint32_t{1} << (kBits % 32)) - 1) << (i * kBits));
      const char* row = v[j / kTileWords] + (j % kTileWords) * (head_dim * 4) + d * 4;
      const auto w = V::and_words(V::load_words_to(row, lanes), V::set1_words(seen));
      sum = K::fma(K::split(w), x + j, sum);
    }
    V::store(o + d, sum);
  }
}

// One tile of rows at work.
template <class V, class K>
class Attend {
 public:
  Attend(const Layer& layer, const Unit& unit, char* scratch)
      : layer_(layer), unit_(unit), dim_(layer.padded_dim()) {
    const int64_t rows = unit.rows;
    const auto take = [&scratch](int64_t bytes) {
      char* taken = scratch;
      scratch += round_up(bytes);
      return taken;
    };
    queries_ = reinterpret_cast<Operand*>(take(rows * (dim_ + 16) * 4));
    scores_ = reinterpret_cast<float*>(take(kMostRows * kSegmentKeys * 4));
    weights_ = reinterpret_cast<Weight*>(scores_);
    if (sizeof(Weight) != 4)
      weights_ = reinterpret_cast<Weight*>(take(kMostRows * kSegmentKeys * sizeof(Weight)));
    part_ = reinterpret_cast<float*>(take(kMostRows * dim_ * 4));
    values_ = reinterpret_cast<float*>(take(rows * dim_ * 4));
    highest_ = reinterpret_cast<float*>(take((rows + 16) * 4));
    totals_ = reinterpret_cast<float*>(take((rows + 16) * 4));
    gathered_ = scratch;
    tiles_ = (rows + V::kMaxRows - 1) / V::kMaxRows;
  }

  void attend() {
    pack_queries();
    if (unit_.parts == nullptr) start();
    for (int64_t segment = unit_.first_segment; segment < unit_.last_segment; ++segment) {
      find_tiles(segment);
      for (int64_t tile = 0; tile < tiles_; ++tile) attend_tile(tile, segment);
    }
    if (unit_.parts == nullptr) finish();
  }

  void merge() {
    start();
    const int64_t stride = part_floats(layer_);
    for (int64_t row = 0; row < unit_.rows; ++row) {
      const Range seen = visible(row);
      const int64_t last = (seen.last + kSegmentKeys - 1) / kSegmentKeys;
      for (int64_t segment = seen.first / kSegmentKeys; segment < last; ++segment) {
        const float* part = unit_.parts + (row * unit_.part_segments + segment - unit_.part_segment) * stride;
        alignas(64) float high[16] = {part[0]}, total[16] = {part[1]};
        merge_rows(row, 1, high, total, part + kPartValues, dim_);
      }
    }
    finish();
  }

 private:
  using F = typename V::F;
  using Operand = typename K::Operand;
  using Weight = typename K::Weight;
  struct Range {
    int64_t first, last;
  };

  using ScoreFn = void (*)(const Operand*, const char* const*, const char* const*, int, int, int,
                           float*);
  using SumFn = void (*)(const Weight*, const char* const*, const char* const*, int, int, int, float*,
                         int64_t);
  struct ScoreTable {
    ScoreFn fns[kMostRows + 1];
    ScoreFn operator[](int64_t rows) const { return fns[rows]; }
  };
  struct SumTable {
    SumFn fns[kMostRows + 1];
    SumFn operator[](int64_t rows) const { return fns[rows]; }
  };

  int64_t tile_start(int64_t tile) const { return unit_.rows * tile / tiles_; }

  int64_t position(int64_t row) const {
    return unit_.position + (unit_.first_row + row) / layer_.group();
  }

  // The positions that a row of this unit sees.
  Range visible(int64_t row) const {
    const int64_t last = position(row) + 1;
    return {layer_.window > 0 ? most(0, last - layer_.window) : 0, last};
  }

  // What of a segment a row sees; empty where last <= first.
  Range visible(int64_t row, int64_t segment) const {
    const Range all = visible(row);
    return {most(all.first - segment * kSegmentKeys, 0),
            least(all.last - segment * kSegmentKeys, kSegmentKeys)};
  }

  void pack_queries() {
    const int64_t group = layer_.group();
    const int64_t words = (layer_.head_dim + K::kWidth - 1) / K::kWidth;
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      const int64_t first = tile_start(tile), rows = tile_start(tile + 1) - first;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = unit_.first_row + first + r;
        const int64_t at = (unit_.token + row / group) * layer_.q_token +
                           (unit_.kv_head * group + row % group) * layer_.q_head;
        Operand* to = queries_ + first * words + r;
        if (layer_.q_dtype == Dtype::float32)
          pack_row(reinterpret_cast<const float*>(layer_.q) + at, to, rows);
        else
          pack_row(reinterpret_cast<const bf16*>(layer_.q) + at, to, rows);
      }
    }
  }

  template <class T>
  void pack_row(const T* q, Operand* to, int64_t stride) const {
    const int64_t whole = layer_.head_dim / K::kWidth;
    for (int64_t i = 0; i < whole; ++i) to[i * stride] = K::operand(q + i * K::kWidth);
    const int64_t rest = layer_.head_dim % K::kWidth;
    if (rest != 0) {
      T last[4] = {};
      for (int64_t i = 0; i < rest; ++i) last[i] = q[whole * K::kWidth + i];
      to[whole * stride] = K::operand(last);
    }
  }

  // Point k_ and v_ at the tiles of a segment that some row of the unit sees.
  void find_tiles(int64_t segment) {
    const int64_t low = visible(0, segment).first, high = visible(unit_.rows - 1, segment).last;
    const int64_t tile_bytes = layer_.tile_bytes();
    if (!layer_.tiled()) {
      for (int t = 0; t < kSegmentTiles; ++t) {
        k_[t] = gathered_ + t * tile_bytes;
        v_[t] = gathered_ + (kSegmentTiles + t) * tile_bytes;
        set_scales(t, k_[t], v_[t]);
      }
      for (int64_t key = low; key < high; ++key) gather(segment * kSegmentKeys + key, key);
      return;
    }
    for (int64_t t = low / kTileKeys; t * kTileKeys < high; ++t) {
      const int64_t tile = tile_at(segment, t);
      const char *k = layer_.k_pool + tile * tile_bytes, *v = layer_.v_pool + tile * tile_bytes;
      k_[t] = k;
      v_[t] = v;
      set_scales(t, k, v);
      if constexpr (Unpacking<K>::kNeeded) unpack(t, k, v);
    }
  }

  // Point next_k_ at the tiles of keys of the segment after this one; behind them, at what is at hand.
  void find_next_keys(int64_t segment) {
    const int64_t last = visible(unit_.rows - 1, segment + 1).last;
    for (int64_t t = 0; t < kSegmentTiles; ++t) {
      next_k_[t] = v_[t];
      if (t * kTileKeys < last)
        next_k_[t] = layer_.k_pool + tile_at(segment + 1, t) * layer_.tile_bytes();
    }
  }

  // Which tile of the pools is tile t of a segment.
  int64_t tile_at(int64_t segment, int64_t t) const {
    const int64_t at = segment * kSegmentKeys + t * kTileKeys;
    const int64_t head = unit_.blocks[at / layer_.block_size] * layer_.num_kv_heads + unit_.kv_head;
    return head * (layer_.block_size / kTileKeys) + at % layer_.block_size / kTileKeys;
  }

  // Where a tile's scales stand.
  void set_scales(int64_t t, const char* k, const char* v) {
    if (!K::kScaled) return;
    k_scales_[t] = reinterpret_cast<const float*>(k + kTileKeys * layer_.coded_dim());
    v_scales_[t] = reinterpret_cast<const float*>(v + kTileKeys * layer_.coded_dim());
  }

  // Unpack a tile of codes into the scratch memory and point k_ and v_ there. A row of V is written in
  // whole vectors: what goes past its end is overwritten, from the last vector of all rows to the first.
  void unpack(int64_t t, const char* k, const char* v) {
    using P = typename K::Packed;
    const int64_t dim = layer_.head_dim, row_bytes = dim * 4;
    const int64_t unpacked_bytes = kTileKeys / P::kWidth * P::kRows * row_bytes;
    char* to_k = gathered_ + t * unpacked_bytes;
    char* to_v = gathered_ + (kSegmentTiles + t) * unpacked_bytes;
    for (int64_t i = 0; i < dim / P::kWidth; ++i)
      P::unpack(V::load_words(k + i * 64), to_k + i * P::kRows * 64, 64);
    for (int64_t quad = 0; quad < kTileKeys / P::kWidth; ++quad)
      for (int64_t d = (dim - 1) / 16 * 16; d >= 0; d -= 16)
        P::unpack(V::load_words_to(v + quad * row_bytes + d * 4, static_cast<int>(least(16, dim - d))),
                  to_v + quad * P::kRows * row_bytes + d * 4, row_bytes);
    k_[t] = to_k;
    v_[t] = to_v;
  }

  // Bring one token's key and value from a block without tiles into the gathered ones.
  void gather(int64_t position, int64_t key) {
    const int64_t dim = layer_.head_dim, item = layer_.item();
    const int64_t head =
        unit_.blocks[position / layer_.block_size] * layer_.num_kv_heads + unit_.kv_head;
    const int64_t at =
        (head * layer_.block_size + position % layer_.block_size) * layer_.token_bytes();
    char* k = const_cast<char*>(k_[key / kTileKeys]);
    char* v = const_cast<char*>(v_[key / kTileKeys]);
    store_key(layer_.k_pool + at, k, key % kTileKeys, dim, item);
    store_value(layer_.v_pool + at, v, key % kTileKeys, dim, item);
    if (K::kScaled) {
      const int64_t codes = layer_.coded_dim(), scale = kTileKeys * codes + key % kTileKeys * 4;
      std::memcpy(k + scale, layer_.k_pool + at + codes, 4);
      std::memcpy(v + scale, layer_.v_pool + at + codes, 4);
    }
  }


  static void store_key(const char* from, char* tile, int64_t key, int64_t dim, int64_t item) {
    if (item == 4) {
      for (int64_t d = 0; d < dim; ++d)
        std::memcpy(tile + (d * kTileKeys + key) * 4, from + d * 4, 4);
      return;
    }
    if (item == 1) {
      for (int64_t d = 0; d < dim; d += 4)
        std::memcpy(tile + d * kTileKeys + key * 4, from + d, 4);
      return;
    }
    for (int64_t d = 0; d + 1 < dim; d += 2)
      std::memcpy(tile + (d * kTileKeys + key * 2) * 2, from + d * 2, 4);
    if (dim % 2 != 0)
      std::memcpy(tile + ((dim - 1) * kTileKeys + key) * 2, from + (dim - 1) * 2, 2);
  }

  static void store_value(const char* from, char* tile, int64_t key, int64_t dim, int64_t item) {
    if (item == 4) {
      std::memcpy(tile + key * dim * 4, from, static_cast<size_t>(dim) * 4);
      return;
    }
    if (item == 1) {
      for (int64_t d = 0; d < dim; ++d) tile[(key / 4 * dim + d) * 4 + key % 4] = from[d];
      return;
    }
    char* to = tile + (key / 2 * dim * 2 + key % 2) * 2;
    for (int64_t d = 0; d < dim; ++d) std::memcpy(to + d * 4, from + d * 2, 2);
  }

  void attend_tile(int64_t tile, int64_t segment) {
    const int64_t start = tile_start(tile), count = tile_start(tile + 1) - start;
    Range seen[kMostRows];
    int64_t from = count, to = 0;  // rows that see anything: they are neighbours
    for (int64_t r = 0; r < count; ++r) {
      seen[r] = visible(start + r, segment);
      if (seen[r].first >= seen[r].last) continue;
      from = least(from, r);
      to = r + 1;
    }
    if (from >= to) return;
    const int64_t words = (layer_.head_dim + K::kWidth - 1) / K::kWidth;
    const int64_t last_tile = (seen[to - 1].last + kTileKeys - 1) / kTileKeys;
    // The first tile of rows brings a segment's values in, and while they are summed up the next one's
    // keys; the others find them in the cache.
    const bool ahead = tile == 0 && layer_.tiled() && !Unpacking<K>::kNeeded;
    const ScoreTable& score = ahead ? kScoreAhead : kScore;
    score[count](queries_ + start * words, k_, v_, static_cast<int>(seen[from].first / kTileKeys),
                 static_cast<int>(last_tile), static_cast<int>(layer_.head_dim), scores_);
    alignas(64) float high[16], total[16];
    for (int64_t r = from; r < to; ++r)
      soften(scores_ + r * kSegmentKeys, weights_ + r * kSegmentKeys, seen[r], &high[r - from],
             &total[r - from]);
    const bool more = ahead && segment + 1 < unit_.last_segment;
    if (more) find_next_keys(segment);
    weigh_values(from, to, seen, more ? kSumAhead : kSum);
    if (unit_.parts == nullptr) {
      merge_rows(start + from, to - from, high, total, part_, dim_);
      return;
    }
    for (int64_t r = from; r < to; ++r) {
      float* part = unit_.parts + ((start + r) * unit_.part_segments + segment - unit_.part_segment) *
                                      part_floats(layer_);
      part[0] = high[r - from];
      part[1] = total[r - from];
      std::memcpy(part + kPartValues, part_ + (r - from) * dim_, static_cast<size_t>(dim_) * 4);
    }
  }

  // From raw scores of one row to weights relative to the highest score.
  void soften(float* s, Weight* p, Range seen, float* highest, float* total) const {
    const int64_t from = seen.first / kTileKeys, to = (seen.last + kTileKeys - 1) / kTileKeys;
    const F scale = V::set1(layer_.scale), lowest = V::set1(-__builtin_inff());
    F best = lowest;
    for (int64_t t = from; t < to; ++t) {
      F x = V::load(s + t * kTileKeys);
      if (K::kScaled) x = V::mul(x, V::load(k_scales_[t]));
      x = V::mul(x, scale);
      if (layer_.softcap != 0.0f) x = cap(x);
      if (cut(t, seen)) x = keep(x, t, seen, lowest);
      V::store(s + t * kTileKeys, x);
      best = V::max(best, x);
    }
    *highest = V::reduce_max(best);
    const F high = V::set1(*highest);
    F sum = V::zero();
    for (int64_t t = from; t < to; ++t) {
      F x = exp<V>(V::sub(V::load(s + t * kTileKeys), high));
      if (cut(t, seen)) x = keep(x, t, seen, V::zero());
      if (K::kScaled) {
        // What stands for the scale of a token that is not seen may be anything.
        F scaled = V::mul(x, V::load(v_scales_[t]));
        if (cut(t, seen)) scaled = keep(scaled, t, seen, V::zero());
        K::store_weights(p + t * kTileKeys, scaled);
        sum = V::add(sum, x);
        continue;
      }
      sum = V::add(sum, K::store_weights(p + t * kTileKeys, x));
    }
    *total = V::reduce_add(sum);
  }

  F cap(F x) const {
    const F c = V::set1(layer_.softcap);
    return V::mul(tanh<V>(V::div(x, c)), c);
  }

  static bool cut(int64_t tile, Range seen) {
    return tile * kTileKeys < seen.first || (tile + 1) * kTileKeys > seen.last;
  }

  static F keep(F x, int64_t tile, Range seen, F other) {
    return V::keep(x, static_cast<int>(most(seen.first - tile * kTileKeys, 0)),
                   static_cast<int>(least(seen.last - tile * kTileKeys, kTileKeys)), other);
  }

  // part_[r - from] = weights times values. What all rows see is done for all at once, the rest row by
  // row, so that a row never meets a value that it does not see.
  void weigh_values(int64_t from, int64_t to, const Range* seen, const SumTable& sum) {
    constexpr int64_t kWidth = K::kWidth;
    const int dim = static_cast<int>(layer_.head_dim);
    std::memset(part_, 0, static_cast<size_t>((to - from) * dim_) * 4);
    const int64_t first = (seen[to - 1].first + kWidth - 1) / kWidth * kWidth;
    const int64_t last = seen[from].last / kWidth * kWidth;
    const bool shared = first < last;
    for (int64_t r = from; r < to; ++r) {
      const int64_t end = shared ? first : seen[r].last;
      if (seen[r].first < end)
        sum_few<V, K>(weights_ + r * kSegmentKeys, v_, static_cast<int>(seen[r].first),
                      static_cast<int>(end), dim, part_ + (r - from) * dim_);
    }
    if (!shared) return;
    sum[to - from](weights_ + from * kSegmentKeys, v_, next_k_, static_cast<int>(first / kWidth),
                   static_cast<int>(last / kWidth), dim, part_, dim_);
    for (int64_t r = from; r < to; ++r)
      if (last < seen[r].last)
        sum_few<V, K>(weights_ + r * kSegmentKeys, v_, static_cast<int>(last),
                      static_cast<int>(seen[r].last), dim, part_ + (r - from) * dim_);
  }

  void start() {
    std::memset(values_, 0, static_cast<size_t>(unit_.rows * dim_) * 4);
    for (int64_t r = 0; r < unit_.rows; ++r) {
      const int64_t head = unit_.kv_head * layer_.group() + (unit_.first_row + r) % layer_.group();
      highest_[r] = layer_.sinks != nullptr ? layer_.sinks[head] : -__builtin_inff();
      totals_[r] = layer_.sinks != nullptr ? 1.0f : 0.0f;
    }
  }

  // Merge one segment's part of rows row..row + count with what came before it.
  void merge_rows(int64_t row, int64_t count, const float* high, const float* total,
                  const float* part, int64_t stride) {
    const F old = V::load(highest_ + row), next = V::load(high);
    const F best = V::max(old, next);
    const F shrink_old = exp<V>(V::sub(old, best)), shrink_next = exp<V>(V::sub(next, best));
    const F sum = V::fma(V::load(totals_ + row), shrink_old, V::mul(V::load(total), shrink_next));
    alignas(64) float bests[16], sums[16], olds[16], nexts[16];
    V::store(bests, best);
    V::store(sums, sum);
    V::store(olds, shrink_old);
    V::store(nexts, shrink_next);
    for (int64_t r = 0; r < count; ++r) {
      highest_[row + r] = bests[r];
      totals_[row + r] = sums[r];
      float* values = values_ + (row + r) * dim_;
      const F a = V::set1(olds[r]), b = V::set1(nexts[r]);
      for (int64_t d = 0; d < dim_; d += 16)
        V::store(values + d, V::fma(V::load(values + d), a, V::mul(V::load(part + r * stride + d), b)));
    }
  }

  void finish() {
    const int64_t group = layer_.group(), dim = layer_.head_dim;
    for (int64_t r = 0; r < unit_.rows; ++r) {
      const int64_t row = unit_.first_row + r;
      const int64_t at = ((unit_.token + row / group) * layer_.num_heads + unit_.kv_head * group +
                          row % group) *
                         dim;
      const float inverse = 1.0f / totals_[r];
      const float* values = values_ + r * dim_;
      if (layer_.q_dtype == Dtype::float32) {
        float* out = reinterpret_cast<float*>(layer_.out) + at;
        for (int64_t d = 0; d < dim; ++d) out[d] = values[d] * inverse;
      } else {
        bf16* out = reinterpret_cast<bf16*>(layer_.out) + at;
        for (int64_t d = 0; d < dim; ++d) out[d] = to_bf16(values[d] * inverse);
      }
    }
  }

  template <bool Ahead, int... I>
  static constexpr ScoreTable score_table(std::integer_sequence<int, I...>) {
    return {{nullptr, &score_rows<V, K, I + 1, Ahead>...}};
  }
  template <bool Ahead, int... I>
  static constexpr SumTable sum_table(std::integer_sequence<int, I...>) {
    return {{nullptr, &sum_rows<V, K, I + 1, Ahead>...}};
  }
  using Counts = std::make_integer_sequence<int, V::kMaxRows>;
  static constexpr ScoreTable kScore = score_table<false>(Counts());
  static constexpr ScoreTable kScoreAhead = score_table<true>(Counts());
  static constexpr SumTable kSum = sum_table<false>(Counts());
  static constexpr SumTable kSumAhead = sum_table<true>(Counts());

  const Layer& layer_;
  const Unit& unit_;
  const int64_t dim_;  // head_dim, padded: strides of float32 rows
  int64_t tiles_;      // of up to V::kMaxRows rows
  Operand* queries_;   // tile after tile: [words][rows of the tile]
  float* scores_;      // [kMostRows][kSegmentKeys]
  Weight* weights_;    // the same shape, and memory where it has the same type
  float* part_;        // [kMostRows][dim_]: one segment's values
  float *values_, *highest_, *totals_;  // [rows]: what is merged so far
  char* gathered_;
  const char *k_[kSegmentTiles], *v_[kSegmentTiles];
  const char* next_k_[kSegmentTiles] = {};
  const float *k_scales_[kSegmentTiles], *v_scales_[kSegmentTiles];  // of int8 caches
};

template <class V, template <class> class Kind>
const Kernels* kernels() {
  static constexpr Kernels both = {
      [](const Layer& layer, const Unit& unit, char* scratch) {
        Attend<V, Kind<V>>(layer, unit, scratch).attend();
      },
      [](const Layer& layer, const Unit& unit, char* scratch) {
        Attend<V, Kind<V>>(layer, unit, scratch).merge();
      }};
  return &both;
}

// int8 caches: units of many rows unpack each tile once, others as they go.
template <class V, template <class> class Kind, template <class> class Codes>
const Kernels* coded_kernels() {
  static constexpr Kernels both = {
      [](const Layer& layer, const Unit& unit, char* scratch) {
        if (unit.rows > V::kMaxRows && layer.tiled() && layer.head_dim % 4 == 0)
          Attend<V, Unpacked<V, Kind, Codes>>(layer, unit, scratch).attend();
        else
          Attend<V, Codes<V>>(layer, unit, scratch).attend();
      },
      [](const Layer& layer, const Unit& unit, char* scratch) {
        Attend<V, Codes<V>>(layer, unit, scratch).merge();
      }};
  return &both;
}

}  // namespace
}  // namespace attention_detail
}  // namespace pagemill
