// The inner loops: raw scores out of tiles of keys, and weighted sums out of tiles of values, for a few
// rows at once. R rows and C or D vectors of sums are a loop of their own, so that all sums stay in
// registers. Internal linkage, as in attention_kernel.h.
#pragma once

#include <cstring>
#include <utility>

#include "attention/attention_work.h"

namespace pagemill {
namespace attention_detail {
namespace {

// Raw scores of R queries and C tiles of keys: q [elements / width][R] operands, s [R][kSegmentKeys].
// Ahead: fetch as many bytes from each tile of v, which come next and which nobody has touched yet; to
// the second cache, for a segment's fill the first.
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
      if (Ahead) __builtin_prefetch(v[c] + i * 64, 0, 2);
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
  // No more than four tiles are read side by side: each is a stream through memory of its own.
  constexpr int kTiles = V::columns(R) < 4 ? V::columns(R) : 4;
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
  constexpr int kDims = V::columns(R);
  const int64_t row_bytes = head_dim * 4;
  int d = 0;
  for (; d + kDims * 16 <= head_dim; d += kDims * 16)
    sum_values<V, K, R, kDims, Ahead>(p, v, next, first, last, row_bytes, d * 4, 16, o + d, stride);
  if (kDims == 8 && d + 64 <= head_dim) {
    sum_values<V, K, R, 4, Ahead>(p, v, next, first, last, row_bytes, d * 4, 16, o + d, stride);
    d += 64;
  }
  if (kDims >= 4 && d + 32 <= head_dim) {
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

// The loops by number of rows, from 1 on.
template <class V, class K>
class Loops {
 public:
  using ScoreFn = void (*)(const typename K::Operand*, const char* const*, const char* const*, int, int,
                           int, float*);
  using SumFn = void (*)(const typename K::Weight*, const char* const*, const char* const*, int, int, int,
                         float*, int64_t);

  // Ahead: also fetch what comes next.
  static ScoreFn score(int64_t rows, bool ahead) { return (ahead ? kScoreAhead : kScore).fns[rows]; }
  static SumFn sum(int64_t rows, bool ahead) { return (ahead ? kSumAhead : kSum).fns[rows]; }

 private:
  struct ScoreTable {
    ScoreFn fns[kMostRows + 1];
  };
  struct SumTable {
    SumFn fns[kMostRows + 1];
  };
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
};

}  // namespace
}  // namespace attention_detail
}  // namespace pagemill
