// Kinds of numbers: how a cache and its queries are multiplied. Each is written over a path's vectors V
// and gives the loops (attention_loops.h) an operand of one word, and its product with a word of a tile.
// Internal linkage, as in attention_kernel.h.
#pragma once

#include <cstring>
#include <type_traits>

#include "attention/attention_work.h"

namespace pagemill {
namespace attention_detail {
namespace {

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

}  // namespace
}  // namespace attention_detail
}  // namespace pagemill
