// The attention of one unit, written once over a path's vectors `V` and a kind of numbers `K`; the
// order of every sum is fixed here and in what it holds (see attention.h):
//
//   attention_segment.h   a segment's tiles, in the pools or brought into scratch memory
//   attention_loops.h     scores of rows against tiles of keys; weighted sums of tiles of values
//   attention_softmax.h   from scores to weights
//   attention_rows.h      what rows have come to; merging segments
//
// Included by the files of instruction sets: all of it has internal linkage.
#pragma once

#include <cstring>

#include "attention/attention_loops.h"
#include "attention/attention_numbers.h"
#include "attention/attention_rows.h"
#include "attention/attention_segment.h"
#include "attention/attention_softmax.h"

namespace pagemill {
namespace attention_detail {
namespace {

// One unit at work: tiles of up to V::kMaxRows rows, segment after segment.
template <class V, class K>
class Attend {
 public:
  Attend(const Layer& layer, const Unit& unit, const Unit* next, char* scratch)
      : layer_(layer),
        unit_(unit),
        next_(next),
        dim_(layer.padded_dim()),
        tiles_((unit.rows + V::kMaxRows - 1) / V::kMaxRows),
        rows_(layer, unit),
        segment_(layer, unit, place(scratch)),
        softmax_(layer, segment_) {}

  void attend() {
    pack_queries();
    if (unit_.parts == nullptr) rows_.start();
    for (int64_t segment = unit_.first_segment; segment < unit_.last_segment; ++segment) {
      segment_.find(segment, {visible(0, segment).first, visible(unit_.rows - 1, segment).last});
      for (int64_t tile = 0; tile < tiles_; ++tile) attend_tile(tile, segment);
    }
    if (unit_.parts == nullptr) rows_.finish();
  }

  void merge() {
    rows_.start();
    for (int64_t row = 0; row < unit_.rows; ++row) {
      const Range seen = visible(row);
      const int64_t last = (seen.last + kSegmentKeys - 1) / kSegmentKeys;
      for (int64_t segment = seen.first / kSegmentKeys; segment < last; ++segment) {
        const float* part = part_of(row, segment);
        alignas(64) float high[16] = {part[0]}, total[16] = {part[1]};
        rows_.merge(row, 1, high, total, part + kPartValues, dim_);
      }
    }
    rows_.finish();
  }

 private:
  using Operand = typename K::Operand;
  using Weight = typename K::Weight;
  using Sums = Loops<V, K>;

  // Take scratch memory for what the members point to; return what is left.
  char* place(char* scratch) {
    const auto take = [&scratch](int64_t bytes) {
      char* taken = scratch;
      scratch += round_up(bytes);
      return taken;
    };
    queries_ = reinterpret_cast<Operand*>(take(unit_.rows * (dim_ + 16) * 4));
    scores_ = reinterpret_cast<float*>(take(kMostRows * kSegmentKeys * 4));
    weights_ = reinterpret_cast<Weight*>(scores_);
    if (sizeof(Weight) != 4)
      weights_ = reinterpret_cast<Weight*>(take(kMostRows * kSegmentKeys * sizeof(Weight)));
    part_ = reinterpret_cast<float*>(take(kMostRows * dim_ * 4));
    return rows_.place(scratch);
  }

  int64_t tile_start(int64_t tile) const { return unit_.rows * tile / tiles_; }

  // Where what the last row of a unit sees ends.
  int64_t last_seen(const Unit& unit) const {
    return unit.position + (unit.first_row + unit.rows - 1) / layer_.group() + 1;
  }

  // The positions that a row of this unit sees.
  Range visible(int64_t row) const {
    const int64_t last = unit_.position + (unit_.first_row + row) / layer_.group() + 1;
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

  // Where a row's part of a segment is left for `merge`.
  float* part_of(int64_t row, int64_t segment) const {
    return unit_.parts +
           (row * unit_.part_segments + segment - unit_.part_segment) * part_floats(layer_);
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
    Sums::score(count, ahead)(queries_ + start * words, segment_.k, segment_.v,
                              static_cast<int>(seen[from].first / kTileKeys),
                              static_cast<int>(last_tile), static_cast<int>(layer_.head_dim), scores_);
    alignas(64) float high[16], total[16];
    for (int64_t r = from; r < to; ++r)
      softmax_.soften(scores_ + r * kSegmentKeys, weights_ + r * kSegmentKeys, seen[r],
                      &high[r - from], &total[r - from]);
    const Unit* next = segment + 1 < unit_.last_segment ? &unit_ : next_;
    const bool more = ahead && next != nullptr;
    if (more) {
      const int64_t coming = next == &unit_ ? segment + 1 : next->first_segment;
      segment_.find_next_keys(*next, coming, last_seen(*next) - coming * kSegmentKeys);
    }
    weigh_values(from, to, seen, more);
    if (unit_.parts == nullptr) {
      rows_.merge(start + from, to - from, high, total, part_, dim_);
      return;
    }
    for (int64_t r = from; r < to; ++r) {
      float* part = part_of(start + r, segment);
      part[0] = high[r - from];
      part[1] = total[r - from];
      std::memcpy(part + kPartValues, part_ + (r - from) * dim_, static_cast<size_t>(dim_) * 4);
    }
  }

  // part_[r - from] = weights times values. What all rows see is done for all at once, the rest row by
  // row, so that a row never meets a value that it does not see.
  void weigh_values(int64_t from, int64_t to, const Range* seen, bool ahead) {
    constexpr int64_t kWidth = K::kWidth;
    const int dim = static_cast<int>(layer_.head_dim);
    std::memset(part_, 0, static_cast<size_t>((to - from) * dim_) * 4);
    const int64_t first = (seen[to - 1].first + kWidth - 1) / kWidth * kWidth;
    const int64_t last = seen[from].last / kWidth * kWidth;
    const bool shared = first < last;
    for (int64_t r = from; r < to; ++r) {
      const int64_t end = shared ? first : seen[r].last;
      if (seen[r].first < end)
        sum_few<V, K>(weights_ + r * kSegmentKeys, segment_.v, static_cast<int>(seen[r].first),
                      static_cast<int>(end), dim, part_ + (r - from) * dim_);
    }
    if (!shared) return;
    Sums::sum(to - from, ahead)(weights_ + from * kSegmentKeys, segment_.v, segment_.next_k,
                                static_cast<int>(first / kWidth), static_cast<int>(last / kWidth), dim,
                                part_, dim_);
    for (int64_t r = from; r < to; ++r)
      if (last < seen[r].last)
        sum_few<V, K>(weights_ + r * kSegmentKeys, segment_.v, static_cast<int>(last),
                      static_cast<int>(seen[r].last), dim, part_ + (r - from) * dim_);
  }

  const Layer& layer_;
  const Unit& unit_;
  const Unit* next_;
  const int64_t dim_;    // head_dim, padded: strides of float32 rows
  const int64_t tiles_;  // of up to V::kMaxRows rows
  Operand* queries_;     // tile after tile: [words][rows of the tile]
  float* scores_;        // [kMostRows][kSegmentKeys]
  Weight* weights_;      // the same shape, and memory where it has the same type
  float* part_;          // [kMostRows][dim_]: one segment's values
  Rows<V> rows_;
  Segment<V, K> segment_;
  Softmax<V, K> softmax_;
};

template <class V, template <class> class Kind>
const Kernels* kernels() {
  static constexpr Kernels both = {
      [](const Layer& layer, const Unit& unit, const Unit* next, char* scratch) {
        Attend<V, Kind<V>>(layer, unit, next, scratch).attend();
      },
      [](const Layer& layer, const Unit& unit, const Unit* next, char* scratch) {
        Attend<V, Kind<V>>(layer, unit, next, scratch).merge();
      }};
  return &both;
}

// int8 caches: units of many rows unpack each tile once, others as they go.
template <class V, template <class> class Kind, template <class> class Codes>
const Kernels* coded_kernels() {
  static constexpr Kernels both = {
      [](const Layer& layer, const Unit& unit, const Unit* next, char* scratch) {
        if (unit.rows > V::kMaxRows && layer.tiled() && layer.head_dim % 4 == 0)
          Attend<V, Unpacked<V, Kind, Codes>>(layer, unit, next, scratch).attend();
        else
          Attend<V, Codes<V>>(layer, unit, next, scratch).attend();
      },
      [](const Layer& layer, const Unit& unit, const Unit* next, char* scratch) {
        Attend<V, Codes<V>>(layer, unit, next, scratch).merge();
      }};
  return &both;
}

}  // namespace
}  // namespace attention_detail
}  // namespace pagemill
