// Writing keys and values into the pools of attention.h.
#pragma once

#include <cstdint>

#include "attention/attention_work.h"

namespace pagemill {
namespace attention_detail {

// A step's new keys or values, [num_tokens, num_kv_heads, head_dim] of layer.q_dtype with strides.
struct Fresh {
  const char* data;
  int64_t token, head;  // elements
};

// Write the keys and values of tokens [first, last) to their slots, rounding to the cache's dtype.
void write_cache(const Layer& layer, const Fresh& keys, const Fresh& values, char* k_pool,
                 char* v_pool, const int64_t* slots, int64_t first, int64_t last);

}  // namespace attention_detail
}  // namespace pagemill
