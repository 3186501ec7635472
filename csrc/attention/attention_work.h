// What attention.cpp tells the kernels: a layer, and one unit of its work. Plain data, so that the files
// of different instruction sets share nothing that is compiled.
#pragma once

#include <cstdint>

#include "common/vec.h"

// Never compiled out of line: the linker must not give one instruction set's copy to another's files.
#define PAGEMILL_INLINE inline __attribute__((always_inline))

namespace pagemill {
namespace attention_detail {

PAGEMILL_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
PAGEMILL_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Keys [first, last): positions, or what of one segment.
struct Range {
  int64_t first, last;
};

constexpr int kTileKeys = 16;
constexpr int kSegmentKeys = 256;
constexpr int kSegmentTiles = kSegmentKeys / kTileKeys;
constexpr int kMaxUnitRows = 192;
constexpr int kMostRows = 6;  // of any path's inner loops

struct Layer {
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  float scale, softcap;  // softcap 0: none
  int64_t window;        // 0: all keys
  Dtype q_dtype, cache_dtype;
  const char *q, *k_pool, *v_pool;
  int64_t q_token, q_head;  // strides, elements
  const float* sinks;       // null: none
  char* out;                // [num_tokens, num_heads, head_dim] of q_dtype

  PAGEMILL_INLINE int64_t group() const { return num_heads / num_kv_heads; }
  PAGEMILL_INLINE int64_t item() const {
    return cache_dtype == Dtype::float32 ? 4 : cache_dtype == Dtype::bfloat16 ? 2 : 1;
  }
  // int8 caches: codes of a token, in whole words.
  PAGEMILL_INLINE int64_t coded_dim() const { return (head_dim + 3) / 4 * 4; }
  // One head's key or value of one token, its scale included.
  PAGEMILL_INLINE int64_t token_bytes() const {
    return cache_dtype == Dtype::int8 ? coded_dim() + 4 : head_dim * item();
  }
  PAGEMILL_INLINE int64_t tile_bytes() const { return kTileKeys * token_bytes(); }
  PAGEMILL_INLINE int64_t padded_dim() const { return (head_dim + 15) / 16 * 16; }
  PAGEMILL_INLINE bool tiled() const { return block_size % kTileKeys == 0; }
};

// Rows of one sequence that share a key head: row r is head r % group of the query r / group.
struct Unit {
  const int64_t* blocks;  // the sequence's
  int64_t token;          // the sequence's first row in q
  int64_t position;       // of that token
  int64_t kv_head;
  int64_t first_row, rows;
  int64_t first_segment, last_segment;  // [first, last)
  // null: this unit sees all segments of its rows, and stores the result. Else it leaves each segment's
  // part, [rows][segments][part_floats], for `merge`, counted from part_segment.
  float* parts;
  int64_t part_segment, part_segments;
};

// A part: its highest score, its sum of weights, and from kPartValues on the weighted values.
constexpr int64_t kPartValues = 16;
PAGEMILL_INLINE int64_t part_floats(const Layer& layer) { return kPartValues + layer.padded_dim(); }

struct Kernels {
  // `next`, which may be null, is what this thread attends to afterwards: its first keys are fetched.
  void (*attend)(const Layer&, const Unit&, const Unit* next, char* scratch);
  void (*merge)(const Layer&, const Unit&, const Unit* next, char* scratch);  // of unit.parts, all segments
};

PAGEMILL_INLINE int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Bytes of scratch that one thread's `attend` or `merge` uses. Queries, scores and weights of a tile of
// rows, a segment's values, running values and sums, and a segment's K and V where they are gathered or
// unpacked.
PAGEMILL_INLINE int64_t unit_scratch_bytes(int64_t head_dim, int64_t rows) {
  const int64_t dim = (head_dim + 15) / 16 * 16;
  // Tiles that are gathered or unpacked; an int8 token has up to three codes more than elements, and a
  // scale.
  const int64_t gathered = 2 * kSegmentKeys * (head_dim + 2) * 4;
  return round_up(rows * (dim + 16) * 4) + kMostRows * kSegmentKeys * 6 + kMostRows * dim * 4 +
         round_up(rows * dim * 4) + 2 * round_up((rows + 16) * 4) + round_up(gathered) + 1024;
}

// The paths' kernels, by how they take numbers: float32 caches; bfloat16 caches widened; bfloat16 caches
// and queries by dot products of pairs; int8 caches widened.
const Kernels* portable_f32();
const Kernels* portable_bf16();
const Kernels* avx2_f32();
const Kernels* avx2_bf16();
const Kernels* avx512_f32();
const Kernels* avx512_bf16();
const Kernels* avx512_bf16_pairs();
const Kernels* portable_int8();
const Kernels* avx2_int8();
const Kernels* avx512_int8();
const Kernels* avx512_int8_pairs();

}  // namespace attention_detail
}  // namespace pagemill
