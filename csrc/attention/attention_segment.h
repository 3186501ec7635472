// Where the tiles of one segment of keys stand: in the pools, or in scratch memory, where blocks without
// tiles are gathered and codes are unpacked. Internal linkage, as in attention_kernel.h.
#pragma once

#include <cstring>

#include "attention/attention_numbers.h"
#include "attention/attention_work.h"

namespace pagemill {
namespace attention_detail {
namespace {

// The tiles that the loops read, K the kind of numbers. Only those that some row of the unit sees are
// set.
template <class V, class K>
class Segment {
 public:
  // memory holds 2 * kSegmentTiles gathered or unpacked tiles.
  Segment(const Layer& layer, const Unit& unit, char* memory)
      : layer_(layer), unit_(unit), memory_(memory) {}

  const char *k[kSegmentTiles], *v[kSegmentTiles];
  const char* next_k[kSegmentTiles] = {};
  const float *k_scales[kSegmentTiles], *v_scales[kSegmentTiles];  // of int8 caches

  // Bring in keys `seen` of a segment.
  void find(int64_t segment, Range seen) {
    const int64_t tile_bytes = layer_.tile_bytes();
    if (!layer_.tiled()) {
      for (int t = 0; t < kSegmentTiles; ++t)
        point(t, memory_ + t * tile_bytes, memory_ + (kSegmentTiles + t) * tile_bytes);
      for (int64_t key = seen.first; key < seen.last; ++key) gather(segment, key);
      return;
    }
    for (int64_t t = seen.first / kTileKeys; t * kTileKeys < seen.last; ++t) {
      const int64_t at = tile_at(unit_, segment, t) * tile_bytes;
      point(t, layer_.k_pool + at, layer_.v_pool + at);
      if constexpr (Unpacking<K>::kNeeded) unpack(t);
    }
  }

  // Point next_k at the tiles of keys [0, last) of a unit's segment; behind them, at what is at hand.
  void find_next_keys(const Unit& unit, int64_t segment, int64_t last) {
    for (int64_t t = 0; t < kSegmentTiles; ++t) {
      next_k[t] = v[t];
      if (t * kTileKeys < last)
        next_k[t] = layer_.k_pool + tile_at(unit, segment, t) * layer_.tile_bytes();
    }
  }

 private:
  // Which tile of the pools is tile t of a unit's segment.
  int64_t tile_at(const Unit& unit, int64_t segment, int64_t t) const {
    const int64_t at = segment * kSegmentKeys + t * kTileKeys;
    const int64_t head = unit.blocks[at / layer_.block_size] * layer_.num_kv_heads + unit.kv_head;
    return head * (layer_.block_size / kTileKeys) + at % layer_.block_size / kTileKeys;
  }

  void point(int64_t t, const char* to_k, const char* to_v) {
    k[t] = to_k;
    v[t] = to_v;
    if (!K::kScaled) return;
    k_scales[t] = reinterpret_cast<const float*>(to_k + kTileKeys * layer_.coded_dim());
    v_scales[t] = reinterpret_cast<const float*>(to_v + kTileKeys * layer_.coded_dim());
  }

  // Unpack a tile of codes into the scratch memory and point k and v there. A row of V is written in
  // whole vectors: what goes past its end is overwritten, from the last vector of all rows to the first.
  void unpack(int64_t t) {
    using P = typename K::Packed;
    const int64_t dim = layer_.head_dim, row_bytes = dim * 4;
    const int64_t unpacked_bytes = kTileKeys / P::kWidth * P::kRows * row_bytes;
    char* to_k = memory_ + t * unpacked_bytes;
    char* to_v = memory_ + (kSegmentTiles + t) * unpacked_bytes;
    for (int64_t i = 0; i < dim / P::kWidth; ++i)
      P::unpack(V::load_words(k[t] + i * 64), to_k + i * P::kRows * 64, 64);
    for (int64_t quad = 0; quad < kTileKeys / P::kWidth; ++quad)
      for (int64_t d = (dim - 1) / 16 * 16; d >= 0; d -= 16)
        P::unpack(
            V::load_words_to(v[t] + quad * row_bytes + d * 4, static_cast<int>(least(16, dim - d))),
            to_v + quad * P::kRows * row_bytes + d * 4, row_bytes);
    k[t] = to_k;
    v[t] = to_v;
  }

  // Bring one token's key and value from a block without tiles into the gathered ones.
  void gather(int64_t segment, int64_t key) {
    const int64_t dim = layer_.head_dim, item = layer_.item();
    const int64_t position = segment * kSegmentKeys + key;
    const int64_t head =
        unit_.blocks[position / layer_.block_size] * layer_.num_kv_heads + unit_.kv_head;
    const int64_t at =
        (head * layer_.block_size + position % layer_.block_size) * layer_.token_bytes();
    char* to_k = const_cast<char*>(k[key / kTileKeys]);
    char* to_v = const_cast<char*>(v[key / kTileKeys]);
    store_key(layer_.k_pool + at, to_k, key % kTileKeys, dim, item);
    store_value(layer_.v_pool + at, to_v, key % kTileKeys, dim, item);
    if (K::kScaled) {
      const int64_t codes = layer_.coded_dim(), scale = kTileKeys * codes + key % kTileKeys * 4;
      std::memcpy(to_k + scale, layer_.k_pool + at + codes, 4);
      std::memcpy(to_v + scale, layer_.v_pool + at + codes, 4);
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

  const Layer& layer_;
  const Unit& unit_;
  char* memory_;
};

}  // namespace
}  // namespace attention_detail
}  // namespace pagemill
