// What the rows of a unit have come to so far: each one's highest score (in powers of two, as in
// attention_softmax.h), its sum of weights and its weighted values, into which segments are merged in
// order of position. Internal linkage, as in attention_kernel.h.
#pragma once

#include <cstring>

#include "attention/attention_math.h"
#include "attention/attention_work.h"

namespace pagemill {
namespace attention_detail {
namespace {

template <class V>
class Rows {
 public:
  Rows(const Layer& layer, const Unit& unit) : layer_(layer), unit_(unit), dim_(layer.padded_dim()) {}

  // Take the memory from `scratch` on, and return what is behind it.
  char* place(char* scratch) {
    values_ = reinterpret_cast<float*>(scratch);
    scratch += round_up(unit_.rows * dim_ * 4);
    highest_ = reinterpret_cast<float*>(scratch);
    scratch += round_up((unit_.rows + 16) * 4);
    totals_ = reinterpret_cast<float*>(scratch);
    return scratch + round_up((unit_.rows + 16) * 4);
  }

  // Begin with no keys but the sinks.
  void start() {
    std::memset(values_, 0, static_cast<size_t>(unit_.rows * dim_) * 4);
    for (int64_t r = 0; r < unit_.rows; ++r) {
      const int64_t head = unit_.kv_head * layer_.group() + (unit_.first_row + r) % layer_.group();
      highest_[r] = layer_.sinks != nullptr ? layer_.sinks[head] * kLog2E : -__builtin_inff();
      totals_[r] = layer_.sinks != nullptr ? 1.0f : 0.0f;
    }
  }

  // Merge one segment's part of rows row..row + count, at most 16, with what came before it. high and
  // total have 16 numbers.
  void merge(int64_t row, int64_t count, const float* high, const float* total, const float* part,
             int64_t stride) {
    const F old = V::load(highest_ + row), next = V::load(high);
    const F best = V::max(old, next);
    const F shrink_old = exp2<V>(V::sub(old, best)), shrink_next = exp2<V>(V::sub(next, best));
    const F sum = V::fma(V::load(totals_ + row), shrink_old, V::mul(V::load(total), shrink_next));
    alignas(64) float bests[16], sums[16], olds[16], nexts[16];
    V::store(bests, best);
    V::store(sums, sum);
    V::store(olds, shrink_old);
    V::store(nexts, shrink_next);
    for (int64_t r = 0; r < count; ++r) {
      highest_[row + r] = bests[r];
      totals_[row + r] = sums[r];
      float* values = values_ + (row + r) * dim_;
      const F a = V::set1(olds[r]), b = V::set1(nexts[r]);
      for (int64_t d = 0; d < dim_; d += 16)
        V::store(values + d, V::fma(V::load(values + d), a, V::mul(V::load(part + r * stride + d), b)));
    }
  }

  // Store the results.
  void finish() {
    const int64_t group = layer_.group(), dim = layer_.head_dim;
    for (int64_t r = 0; r < unit_.rows; ++r) {
      const int64_t row = unit_.first_row + r;
      const int64_t at = ((unit_.token + row / group) * layer_.num_heads + unit_.kv_head * group +
                          row % group) *
                         dim;
      const float inverse = 1.0f / totals_[r];
      const float* values = values_ + r * dim_;
      if (layer_.q_dtype == Dtype::float32) {
        float* out = reinterpret_cast<float*>(layer_.out) + at;
        for (int64_t d = 0; d < dim; ++d) out[d] = values[d] * inverse;
      } else {
        bf16* out = reinterpret_cast<bf16*>(layer_.out) + at;
        for (int64_t d = 0; d < dim; ++d) out[d] = to_bf16(values[d] * inverse);
      }
    }
  }

 private:
  using F = typename V::F;

  const Layer& layer_;
  const Unit& unit_;
  const int64_t dim_;                   // head_dim, padded: strides of values
  float *values_, *highest_, *totals_;  // [rows][dim_], [rows], [rows]
};

}  // namespace
}  // namespace attention_detail
}  // namespace pagemill
