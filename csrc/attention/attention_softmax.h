// From scores to weights: the softmax of one row over one segment. Internal linkage, as in
// attention_kernel.h.
#pragma once

#include "attention/attention_math.h"
#include "attention/attention_segment.h"

namespace pagemill {
namespace attention_detail {
namespace {

template <class V, class K>
class Softmax {
 public:
  using Weight = typename K::Weight;

  Softmax(const Layer& layer, const Segment<V, K>& segment) : layer_(layer), segment_(segment) {}

  // From raw scores of one row to weights relative to the highest score. Scores count in powers of two:
  // they are multiplied with log2(e), which costs nothing more than their scale does.
  void soften(float* s, Weight* p, Range seen, float* highest, float* total) const {
    const int64_t from = seen.first / kTileKeys, to = (seen.last + kTileKeys - 1) / kTileKeys;
    const bool capped = layer_.softcap != 0.0f;
    const F scale = V::set1(capped ? layer_.scale : layer_.scale * kLog2E);
    F best = V::set1(-__builtin_inff());
    for (int64_t t = from; t < to; ++t) {
      F x = V::mul(raw(s, t), scale);
      if (capped) {
        x = cap(x);
        V::store(s + t * kTileKeys, x);
      }
      if (cut(t, seen)) x = keep(x, t, seen, V::set1(-__builtin_inff()));
      best = V::max(best, x);
    }
    *highest = V::reduce_max(best);
    const F less = V::set1(-*highest);
    F sum = V::zero();
    for (int64_t t = from; t < to; ++t) {
      F x = capped ? V::add(V::load(s + t * kTileKeys), less) : V::fma(raw(s, t), scale, less);
      x = exp2<V>(x);
      if (cut(t, seen)) x = keep(x, t, seen, V::zero());
      if (K::kScaled) {
        // What stands for the scale of a token that is not seen may be anything.
        F scaled = V::mul(x, V::load(segment_.v_scales[t]));
        if (cut(t, seen)) scaled = keep(scaled, t, seen, V::zero());
        K::store_weights(p + t * kTileKeys, scaled);
        sum = V::add(sum, x);
        continue;
      }
      sum = V::add(sum, K::store_weights(p + t * kTileKeys, x));
    }
    *total = V::reduce_add(sum);
  }

 private:
  using F = typename V::F;

  // Raw scores of a tile, those of codes with the scales of their keys.
  F raw(const float* s, int64_t tile) const {
    const F x = V::load(s + tile * kTileKeys);
    return K::kScaled ? V::mul(x, V::load(segment_.k_scales[tile])) : x;
  }

  F cap(F x) const {
    return V::mul(tanh<V>(V::div(x, V::set1(layer_.softcap))), V::set1(layer_.softcap * kLog2E));
  }

  static bool cut(int64_t tile, Range seen) {
    return tile * kTileKeys < seen.first || (tile + 1) * kTileKeys > seen.last;
  }

  static F keep(F x, int64_t tile, Range seen, F other) {
    return V::keep(x, static_cast<int>(most(seen.first - tile * kTileKeys, 0)),
                   static_cast<int>(least(seen.last - tile * kTileKeys, kTileKeys)), other);
  }

  const Layer& layer_;
  const Segment<V, K>& segment_;
};

}  // namespace
}  // namespace attention_detail
}  // namespace pagemill
