// Attention over the paged cache: one call writes a step's keys and values and attends, for prefill,
// decode and mixed steps.
//
// The pools, [num_blocks][num_kv_heads][block_size * head_dim numbers]. Where 16 divides the block
// size, a block is tiles of 16 tokens:
//
//   K  float32   [head_dim][16 tokens]           V  float32   [16 tokens][head_dim]
//      bfloat16  [head_dim / 2][16 tokens][2]       bfloat16  [8 pairs of tokens][head_dim][2]
//
// so that a vector of scores is sums over rows of a K tile, and a vector of the output sums over rows of
// a V tile, with nothing to transpose; pairs are what dpbf16 takes. (An odd last element of bfloat16
// keys stands alone, [16 tokens].) In blocks of other sizes tokens lie one after another, and are
// brought into tiles when they are read.
//
// An int8 pool has codes from -127 to 127 and a float32 scale a token and head, its largest absolute
// value / 127; a code is value / scale, rounded to nearest even. A head's token takes c + 4 bytes, c
// being head_dim rounded up to 4, and a tile 16 times as many:
//
//   K  [c / 4][16 tokens][4], [16 scales]         V  [4 quads of tokens][head_dim][4], to 16 c,
//                                                    [16 scales]
//
// In other blocks a token is c codes and its scale. A key or value that is not finite has the scale NaN.
// Queries are not rounded to codes: a code is widened (to float32, or to bfloat16 where queries and
// weights are, as over bfloat16 caches), scores are multiplied with the scales of their keys and weights
// with those of their values. Units of many rows widen a tile once, others as they go: same sums.
//
// Exactness: what a row of the result is made of hangs on its own query, the keys that it sees and
// their absolute positions, and on nothing else (but the instruction set):
//   - keys are cut into segments of 256 at absolute positions; a segment has its own maximum, its sum of
//     weights (16 partial sums by position modulo 16) and its weighted values (one accumulator that
//     takes keys, or pairs of keys, in order of position);
//   - segments are merged in order of position, each the same way (Milakov & Gimelshein 2018);
//   - a score is one accumulator that takes elements, or pairs of elements, in order.
// How rows share tiles, threads share work and blocks hold tokens decides only who computes what.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace pagemill {

namespace attention_detail {
struct Work;
}

// The sequences of one step; kept by Python for all layers of the step.
class AttentionPlan {
 public:
  // Sequence i owns rows query_starts[i]..query_starts[i + 1] of the step; num_computed[i] of its tokens
  // are in the cache. block_tables [num_seqs, table_width] and slots [num_tokens], where each token is
  // written, are int64 and must outlive the plan. Blocks that no query of the step sees, behind a window,
  // are not read: any valid number may stand for them. kind: which of a step's plans it is, where layers
  // have block tables of several kinds.
  AttentionPlan(std::vector<int64_t> query_starts, std::vector<int64_t> num_computed,
                uintptr_t block_tables, int64_t table_width, uintptr_t slots, int64_t block_size,
                int64_t kind = 0);
  ~AttentionPlan();
  AttentionPlan(const AttentionPlan&) = delete;
  AttentionPlan& operator=(const AttentionPlan&) = delete;

  std::vector<int64_t> starts, computed;
  const int64_t* tables;
  int64_t table_width;
  const int64_t* slots;
  int64_t block_size, kind;
  int64_t most_block = -1;  // the highest block number that is read or written
  // Units of work of layers seen so far; layers that agree share them.
  std::vector<std::unique_ptr<attention_detail::Work>> works;

  int64_t num_seqs() const { return static_cast<int64_t>(computed.size()); }
  int64_t num_tokens() const { return starts.back(); }
};

// The most bytes of scratch memory that `attention` may ask for with `threads` threads.
int64_t attention_scratch_bytes(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                int64_t max_tokens, int64_t max_len, int64_t threads);

// Write k and v to the pools, then attend. Returns 0, or, having done nothing, the bytes of scratch
// memory that it needs when scratch_bytes is less.
//
// q [num_tokens, num_heads, head_dim] and k, v [num_tokens, num_kv_heads, head_dim] of q_dtype have
// strides (elements) of tokens and heads; out is like q, contiguous. The pools have cache_dtype.
// softcap 0: none. window: keys that a query sees, itself included; 0: all. sinks: float32 [num_heads]
// or 0.
int64_t attention(AttentionPlan& plan, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                  float scale, float softcap, int64_t window, int q_dtype, int cache_dtype,
                  uintptr_t q, int64_t q_token, int64_t q_head, uintptr_t k, int64_t k_token,
                  int64_t k_head, uintptr_t v, int64_t v_token, int64_t v_head, uintptr_t k_pool,
                  uintptr_t v_pool, int64_t num_blocks, uintptr_t sinks, uintptr_t out,
                  uintptr_t scratch, int64_t scratch_bytes);

}  // namespace pagemill
