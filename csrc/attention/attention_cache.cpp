#include "attention/attention_cache.h"

namespace pagemill {
namespace attention_detail {
namespace {

void convert(float from, float* to) { *to = from; }
void convert(float from, bf16* to) { *to = to_bf16(from); }
void convert(bf16 from, float* to) { *to = to_float(from); }
void convert(bf16 from, bf16* to) { *to = from; }

// Copy one head of one token: element d goes to to[d * step], and pairs of a bfloat16 key, which stay
// together, to to[d / 2 * pair_step].
template <class From, class To>
void copy(const From* from, To* to, int64_t dim, int64_t step) {
  for (int64_t d = 0; d < dim; ++d) convert(from[d], to + d * step);
}

template <class From, class To>
void copy_pairs(const From* from, To* to, int64_t dim, int64_t pair_step) {
  for (int64_t d = 0; d + 1 < dim; d += 2) {
    convert(from[d], to + d / 2 * pair_step);
    convert(from[d + 1], to + d / 2 * pair_step + 1);
  }
}

template <class From, class To>
void write(const Layer& layer, const Fresh& keys, const Fresh& values, To* k_pool, To* v_pool,
           const int64_t* slots, int64_t first, int64_t last) {
  constexpr bool kPairs = sizeof(To) == 2;
  const int64_t dim = layer.head_dim, size = layer.block_size;
  for (int64_t token = first; token < last; ++token) {
    const int64_t block = slots[token] / size, offset = slots[token] % size;
    for (int64_t head = 0; head < layer.num_kv_heads; ++head) {
      const From* k = reinterpret_cast<const From*>(keys.data) + token * keys.token + head * keys.head;
      const From* v =
          reinterpret_cast<const From*>(values.data) + token * values.token + head * values.head;
      const int64_t home = (block * layer.num_kv_heads + head) * size * dim;
      if (!layer.tiled()) {
        copy(k, k_pool + home + offset * dim, dim, 1);
        copy(v, v_pool + home + offset * dim, dim, 1);
        continue;
      }
      const int64_t tile = home + offset / kTileKeys * kTileKeys * dim, lane = offset % kTileKeys;
      if (kPairs) {
        copy_pairs(k, k_pool + tile + lane * 2, dim, 2 * kTileKeys);
        if (dim % 2 != 0) convert(k[dim - 1], k_pool + tile + (dim - 1) * kTileKeys + lane);
        copy(v, v_pool + tile + lane / 2 * 2 * dim + lane % 2, dim, 2);
      } else {
        copy(k, k_pool + tile + lane, dim, kTileKeys);
        copy(v, v_pool + tile + lane * dim, dim, 1);
      }
    }
  }
}

template <class From>
void write_from(const Layer& layer, const Fresh& keys, const Fresh& values, char* k_pool,
                char* v_pool, const int64_t* slots, int64_t first, int64_t last) {
  if (layer.cache_dtype == Dtype::float32)
    write<From>(layer, keys, values, reinterpret_cast<float*>(k_pool),
                reinterpret_cast<float*>(v_pool), slots, first, last);
  else
    write<From>(layer, keys, values, reinterpret_cast<bf16*>(k_pool),
                reinterpret_cast<bf16*>(v_pool), slots, first, last);
}

}  // namespace

void write_cache(const Layer& layer, const Fresh& keys, const Fresh& values, char* k_pool,
                 char* v_pool, const int64_t* slots, int64_t first, int64_t last) {
  if (layer.q_dtype == Dtype::float32)
    write_from<float>(layer, keys, values, k_pool, v_pool, slots, first, last);
  else
    write_from<bf16>(layer, keys, values, k_pool, v_pool, slots, first, last);
}

}  // namespace attention_detail
}  // namespace pagemill
