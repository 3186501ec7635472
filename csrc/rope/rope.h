// Queries and keys of a step, made ready for attention in one pass: the norm of each head and the
// rotation by its position (Su et al. 2021).
#pragma once

#include <cstdint>

namespace pagemill {

// Change `num_heads` heads of each token in place: heads[tokens][num_heads, head_dim], `token_stride`
// elements from token to token, heads one after another.
//
// weight [num_heads, head_dim] or 0: each head becomes head / rms(head) * (offset + weight), as in
// rms_norm. cos and sin [tokens, half] or 0: pairs of a head's first 2 * half elements are turned, each
// product and sum rounded to `dtype`; a pair is (i, i + half), or (2i, 2i + 1) with `interleaved`.
// Exactness: as in rms_norm; a head's bits depend on that head, its weight and its angles alone.
void rotate_heads(uintptr_t heads, int64_t token_stride, int64_t tokens, int64_t num_heads,
                  int64_t head_dim, uintptr_t weight, float eps, float offset, uintptr_t cos,
                  uintptr_t sin, int64_t half, bool interleaved, int dtype);

// cos and sin [count, half] of `dtype` become scaling * cos and sin of positions[count] (int64) times
// inv_freq[half] (float32), computed in float32 and rounded once. Each depends on its position alone.
void rope_angles(uintptr_t positions, int64_t count, uintptr_t inv_freq, int64_t half, float scaling,
                 uintptr_t cos, uintptr_t sin, int dtype);

}  // namespace pagemill
