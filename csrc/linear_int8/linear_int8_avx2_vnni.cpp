#include <immintrin.h>

#include "linear_int8/linear_int8_loops.h"

namespace pagemill::linear_int8_detail {
namespace {

// Byte products of processors without AVX-512. 16 registers: up to 12 sums, 2 of weights, one of
// activations. (The tests also compile this file for AVX-512's form of the instruction, which more
// machines can run.)
struct V {
  using Sums = __m256i;
  using Weights = __m256i;
  using Codes = __m256i;
  static constexpr int kLanes = 8, kMaxRowGroup = 6, kAloneRows = 6;
  static constexpr int max_tiles(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
  static constexpr bool kWords = false;
  static Sums zero() { return _mm256_setzero_si256(); }
  static Sums load(const int32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static void store(int32_t* p, Sums v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
  }
  static Sums add(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
  static Weights weights(const char* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static Codes spread(const char* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
  }
  static void keep(Sums& v) { __asm__ volatile("" : "+x"(v)); }
  static Sums dot(Sums sums, Weights w, Codes x) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sums, w, x);
#else
    return _mm256_dpbusd_epi32(sums, w, x);
#endif
  }
};

}  // namespace

const Kernels* avx2_vnni_kernels() { return make_kernels<V>(); }

}  // namespace pagemill::linear_int8_detail
