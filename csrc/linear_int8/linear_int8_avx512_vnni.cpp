#include <immintrin.h>

#include "linear_int8/linear_int8_loops.h"

namespace pagemill::linear_int8_detail {
namespace {

// 32 registers: up to 24 sums, 4 of weights, one of activations.
struct V {
  using Sums = __m512i;
  using Weights = __m512i;
  using Codes = __m512i;
  static constexpr int kLanes = 16, kMaxRowGroup = 6, kAloneRows = 12;
  static constexpr int max_tiles(int rows) { return rows <= 6 ? 4 : rows <= 8 ? 3 : 2; }
  static constexpr bool kWords = false;
  static Sums zero() { return _mm512_setzero_si512(); }
  static Sums load(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store(int32_t* p, Sums v) { _mm512_storeu_si512(p, v); }
  static Sums add(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
  static Weights weights(const char* p) { return _mm512_loadu_si512(p); }
  static Codes spread(const char* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
  }
  static void keep(Sums& v) { __asm__ volatile("" : "+v"(v)); }
  static Sums dot(Sums sums, Weights w, Codes x) { return _mm512_dpbusd_epi32(sums, w, x); }
};

}  // namespace

const Kernels* avx512_vnni_kernels() { return make_kernels<V>(); }

}  // namespace pagemill::linear_int8_detail
