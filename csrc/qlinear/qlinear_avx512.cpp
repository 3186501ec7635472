#include <immintrin.h>

#include "qlinear/qlinear_avx512.h"

namespace pagemill::qlinear_detail {
namespace {

struct V : Wide512 {
  static constexpr bool kPairs = false;
};

}  // namespace

const Kernels* avx512_kernels() { return make_kernels<V>(); }

}  // namespace pagemill::qlinear_detail
