#include "attention/attention_cache.h"

#include <cstring>
#include <vector>

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

// How many tokens from `token` on stand one after the other in one tile.
int64_t run_of(const int64_t* slots, int64_t token, int64_t last) {
  const int64_t slot = slots[token];
  int64_t count = 1;
  while (token + count < last && slots[token + count] == slot + count && (slot + count) % kTileKeys != 0)
    ++count;
  return count;
}

// One head of tokens that stand one after the other in a tile.
template <class From, class To>
struct TileRun {
  int64_t dim;
  const From *k, *v;         // of the first token
  int64_t k_token, v_token;  // strides, elements
  To *k_tile, *v_tile;

  void write(int64_t lane, int64_t count) const {
    for (int64_t i = 0; i < count;) {
      const From *key = k + i * k_token, *value = v + i * v_token;
      // Two tokens share words: such come as one.
      if constexpr (sizeof(From) == 2 && sizeof(To) == 2) {
        if ((lane + i) % 2 == 0 && i + 1 < count) {
          write_two(key, value, lane + i);
          i += 2;
          continue;
        }
      }
      write_one(key, value, lane + i);
      ++i;
    }
  }

 private:
  void write_one(const From* key, const From* value, int64_t lane) const {
    if constexpr (sizeof(To) == 2) {
      copy_pairs(key, k_tile + lane * 2, dim, 2 * kTileKeys);
      if (dim % 2 != 0) convert(key[dim - 1], k_tile + (dim - 1) * kTileKeys + lane);
      copy(value, v_tile + lane / 2 * 2 * dim + lane % 2, dim, 2);
    } else {
      copy(key, k_tile + lane, dim, kTileKeys);
      copy(value, v_tile + lane * dim, dim, 1);
    }
  }

  // Of bfloat16 throughout.
  void write_two(const From* key, const From* value, int64_t lane) const {
    constexpr uint64_t kLower = 0xffffffffu;
    const From *next_key = key + k_token, *next_value = value + v_token;
    To* to = k_tile + lane * 2;
    int64_t d = 0;
    for (; d + 4 <= dim; d += 4, to += 4 * kTileKeys) {
      // A word's lower half lies first in memory, as everywhere here.
      uint64_t a, b;
      std::memcpy(&a, key + d, sizeof a);
      std::memcpy(&b, next_key + d, sizeof b);
      const uint64_t first = (a & kLower) | (b << 32), second = (a >> 32) | (b & ~kLower);
      std::memcpy(to, &first, sizeof first);
      std::memcpy(to + 2 * kTileKeys, &second, sizeof second);
    }
    for (; d + 2 <= dim; d += 2, to += 2 * kTileKeys) {
      std::memcpy(to, key + d, 4);
      std::memcpy(to + 2, next_key + d, 4);
    }
    if (d < dim) {
      convert(key[d], k_tile + d * kTileKeys + lane);
      convert(next_key[d], k_tile + d * kTileKeys + lane + 1);
    }
    to = v_tile + lane * dim;
    for (d = 0; d < dim; ++d) {
      to[2 * d] = value[d];
      to[2 * d + 1] = next_value[d];
    }
  }
};

// Round one head of one token to codes [coded_dim], 0 past head_dim, and return their scale.
template <class From>
float round_codes(const From* from, int64_t dim, int64_t padded, int8_t* codes) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: leaves a whole number in the low bits
  uint32_t largest = 0;                  // as bits, which rise as absolute values do
  for (int64_t d = 0; d < dim; ++d) {
    float x;
    convert(from[d], &x);
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits &= 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  float scale;
  std::memcpy(&scale, &largest, sizeof scale);
  scale = largest < 0x7f800000u ? scale / 127.0f : __builtin_nanf("");
  std::memset(codes, 0, static_cast<size_t>(padded));
  if (!(scale > 0.0f)) return scale;
  for (int64_t d = 0; d < dim; ++d) {
    float x;
    convert(from[d], &x);
    x /= scale;
    x = x < -127.0f ? -127.0f : (x > 127.0f ? 127.0f : x);
    x += kRound;
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    codes[d] = static_cast<int8_t>(bits & 0xffu);
  }
  return scale;
}

template <class From>
void write_codes(const Layer& layer, const Fresh& keys, const Fresh& values, char* k_pool,
                 char* v_pool, const int64_t* slots, int64_t first, int64_t last) {
  const int64_t dim = layer.head_dim, size = layer.block_size, padded = layer.coded_dim();
  std::vector<int8_t> codes(static_cast<size_t>(padded));
  for (int64_t token = first; token < last; ++token) {
    const int64_t block = slots[token] / size, offset = slots[token] % size;
    for (int64_t head = 0; head < layer.num_kv_heads; ++head) {
      const int64_t home = (block * layer.num_kv_heads + head) * size * layer.token_bytes();
      const int64_t lane = offset % kTileKeys;
      for (const bool is_key : {true, false}) {
        const Fresh& fresh = is_key ? keys : values;
        const From* from =
            reinterpret_cast<const From*>(fresh.data) + token * fresh.token + head * fresh.head;
        const float scale = round_codes(from, dim, padded, codes.data());
        char* to = (is_key ? k_pool : v_pool) + home;
        if (!layer.tiled()) {
          to += offset * layer.token_bytes();
          std::memcpy(to, codes.data(), static_cast<size_t>(padded));
          std::memcpy(to + padded, &scale, sizeof scale);
          continue;
        }
        to += offset / kTileKeys * layer.tile_bytes();
        std::memcpy(to + kTileKeys * padded + lane * 4, &scale, sizeof scale);
        if (is_key) {
          for (int64_t d = 0; d < padded; d += 4)
            std::memcpy(to + d * kTileKeys + lane * 4, &codes[static_cast<size_t>(d)], 4);
        } else {
          for (int64_t d = 0; d < dim; ++d)
            to[(lane / 4 * dim + d) * 4 + lane % 4] =
                static_cast<char>(codes[static_cast<size_t>(d)]);
        }
      }
    }
  }
}

template <class From, class To>
void write(const Layer& layer, const Fresh& keys, const Fresh& values, To* k_pool, To* v_pool,
           const int64_t* slots, int64_t first, int64_t last) {
  const int64_t dim = layer.head_dim, size = layer.block_size;
  for (int64_t token = first, run = 1; token < last; token += run) {
    run = layer.tiled() ? run_of(slots, token, last) : 1;
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
      const int64_t tile = home + offset / kTileKeys * kTileKeys * dim;
      const TileRun<From, To> tokens{dim, k, v, keys.token, values.token, k_pool + tile, v_pool + tile};
      tokens.write(offset % kTileKeys, run);
    }
  }
}

template <class From>
void write_from(const Layer& layer, const Fresh& keys, const Fresh& values, char* k_pool,
                char* v_pool, const int64_t* slots, int64_t first, int64_t last) {
  if (layer.cache_dtype == Dtype::int8)
    write_codes<From>(layer, keys, values, k_pool, v_pool, slots, first, last);
  else if (layer.cache_dtype == Dtype::float32)
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
