// The inner loops of `linear_int8`, written once over a vector type V and compiled once an instruction
// set. Included by the linear_int8_<isa>.cpp files only; everything is in an unnamed namespace, so that
// no code compiled for one instruction set is shared with another.
//
// V gives: Sums (kLanes of int32), kLanes, kMaxRowGroup, kAloneRows (a row group that is the only one),
// max_tiles(rows), kWords, zero(), load(int32*), store(int32*, Sums), add(Sums, Sums); Weights and
// weights(p): kLanes outputs times 4 bytes; Codes and spread(p): four activation codes (8 bytes at p with
// kWords, else 4), for all lanes; dot(sums, weights, codes); keep(sums): the compiler may not know what
// they are.
#pragma once

#include <cstring>

#include "linear/epilogue_loops.h"
#include "linear_int8/linear_int8_kernels.h"

namespace pagemill::linear_int8_detail {
namespace {

template <class V, int M, int NT>
void micro(const Block& block) {
  constexpr int kVecs = kTile / V::kLanes, kSums = NT * kVecs;
  // Sums of whole numbers may be taken in any order: few of them are split, to be under way at once.
  constexpr int kChains = M * kSums >= 4 ? 1 : 4 / (M * kSums);
  constexpr int kStep = V::kWords ? 8 : 4;
  typename V::Sums acc[kChains][M][kSums];
#pragma GCC unroll 16
  for (int chain = 0; chain < kChains; ++chain)
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < kSums; ++j) acc[chain][i][j] = V::zero();
  const char *a = block.a, *b = block.b;
  for (int64_t kt = 0; kt < block.k_tiles; ++kt, b += kTileBytes) {
    // Elsewhere the line in use is asked for again, which costs nothing but the instruction.
    const int64_t ahead = kt >= block.ahead_first && kt < block.ahead_last ? block.ahead : 0;
    for (int r = 0; r < 16; r += kChains) {
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain, a += kStep) {
        const char* row = b + (r + chain) * 64;
        typename V::Weights w[kSums];
#pragma GCC unroll 4
        for (int t = 0; t < NT; ++t) {
          __builtin_prefetch(row + t * block.b_stride + ahead, 0, 2);
#pragma GCC unroll 4
          for (int v = 0; v < kVecs; ++v)
            w[t * kVecs + v] = V::weights(row + t * block.b_stride + v * V::kLanes * 4);
        }
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
          const typename V::Codes x = V::spread(a + i * block.a_stride);
#pragma GCC unroll 16
          for (int j = 0; j < kSums; ++j) acc[chain][i][j] = V::dot(acc[chain][i][j], w[j], x);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < kSums; ++j) {
      typename V::Sums sum = acc[0][i][j];
#pragma GCC unroll 4
      for (int chain = 1; chain < kChains; ++chain) sum = V::add(sum, acc[chain][i][j]);
      int32_t* c = block.c + i * block.c_stride + j * V::kLanes;
      V::store(c, block.accumulate ? V::add(sum, V::load(c)) : sum);
    }
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline uint32_t bits_of(bf16 x) { return static_cast<uint32_t>(x) << 16; }
inline float float_of(float x) { return x; }
inline float float_of(bf16 x) { return to_float(x); }
inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr uint32_t kInfinity = 0x7f800000u;

// The largest absolute value, as bits: NaN is above infinity, and whole numbers have a maximum that
// does not hang on order.
template <class T>
inline uint32_t largest_bits(const T* x, int64_t k) {
  uint32_t high = 0;
  for (int64_t i = 0; i < k; ++i) {
    const uint32_t size = bits_of(x[i]) & 0x7fffffffu;
    high = size > high ? size : high;
  }
  return high;
}

// The lowest and highest number, 0 among them, of a row that is finite.
template <class T>
inline void find_range(const T* x, int64_t k, float* lowest, float* highest) {
  // Bits of negative numbers turned over rise as the numbers do.
  int32_t low = 0, high = 0;
  for (int64_t i = 0; i < k; ++i) {
    const int32_t bits = static_cast<int32_t>(bits_of(x[i]));
    const int32_t order = bits ^ ((bits >> 31) & 0x7fffffff);
    low = order < low ? order : low;
    high = order > high ? order : high;
  }
  *lowest = float_of_bits(static_cast<uint32_t>(low ^ ((low >> 31) & 0x7fffffff)));
  *highest = float_of_bits(static_cast<uint32_t>(high));
}

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number in the low bits

template <class T>
inline void make_codes(const T* x, int64_t k, float scale, float zero, float low, int8_t* codes) {
  for (int64_t i = 0; i < k; ++i) {
    float v = float_of(x[i]) / scale;
    v = v < -1024.0f ? -1024.0f : (v > 1024.0f ? 1024.0f : v);
    v = ((v + kRound) - kRound) + zero;
    v = v < low ? low : (v > 127.0f ? 127.0f : v);
    codes[i] = static_cast<int8_t>(bits_of(v + kRound) & 0xffu);
  }
}

template <class T>
inline RowScale quantize_row(const Quantize& q) {
  const T* x = reinterpret_cast<const T*>(q.x);
  RowScale row{q.scale, q.zero, 0};
  const uint32_t largest = largest_bits(x, q.k);
  float low = -128.0f;
  bool finite = largest <= kInfinity;  // infinity is cut where the scale is fixed
  if (q.rounding == Rounding::per_row) {
    finite = largest < kInfinity;
    row.scale = float_of_bits(largest) / 127.0f;
    row.zero = 0;
    low = -127.0f;
  } else if (q.rounding == Rounding::per_row_zero) {
    finite = largest < kInfinity;
    float lowest = 0.0f, highest = 0.0f;
    find_range(x, q.k, &lowest, &highest);
    row.scale = highest / 255.0f - lowest / 255.0f;
    const float zero = row.scale > 0.0f ? ((-128.0f - lowest / row.scale) + kRound) - kRound : 0.0f;
    row.zero = static_cast<int32_t>(zero < -128.0f ? -128.0f : (zero > 127.0f ? 127.0f : zero));
  }
  if (!finite) row.scale = float_of_bits(0x7fc00000u);
  if (!(row.scale > 0.0f)) {
    std::memset(q.codes, 0, static_cast<size_t>(q.padded));
    row.zero = 0;
    return row;
  }
  make_codes(x, q.k, row.scale, static_cast<float>(row.zero), low, q.codes);
  std::memset(q.codes + q.k, 0, static_cast<size_t>(q.padded - q.k));
  int32_t sum = 0;
  for (int64_t i = 0; i < q.k; ++i) sum += q.codes[i];
  row.shift = 128 * sum;
  return row;
}

inline RowScale quantize(const Quantize& q) {
  const RowScale row = q.dtype == static_cast<int>(Dtype::float32) ? quantize_row<float>(q)
                                                                   : quantize_row<bf16>(q);
  if (q.to != nullptr) {
    int16_t* words = reinterpret_cast<int16_t*>(q.to);
    for (int64_t i = 0; i < q.padded; i += 4) {
      words[i] = q.codes[i];
      words[i + 1] = q.codes[i + 2];
      words[i + 2] = q.codes[i + 1];
      words[i + 3] = q.codes[i + 3];
    }
  }
  return row;
}

inline void scale_block(const Scale& s) {
  for (int i = 0; i < s.rows; ++i) {
    const RowScale& row = s.of_rows[i];
    const int32_t* c = s.c + i * s.c_stride;
    float* to = s.to + i * s.width;
    if (row.zero == 0) {
      for (int j = 0; j < s.width; ++j)
        to[j] = static_cast<float>(c[j] - row.shift) * row.scale * s.scales[j];
    } else {
      for (int j = 0; j < s.width; ++j)
        to[j] = static_cast<float>(c[j] - row.shift - row.zero * s.sums[j]) * row.scale * s.scales[j];
    }
  }
}

// Multiply in registers alone, but for codes that are loaded anew each round; returns the operations done
// (a product and a sum are two).
template <class V>
double peak(int64_t rounds) {
  constexpr int kCodes = 4, kWeights = V::kLanes == 16 ? 3 : 2, kSums = kCodes * kWeights;
  alignas(64) char bytes[64 * kWeights] = {};
  // What the bytes are is hidden from the compiler: no two sums may become one.
  __asm__ volatile("" : : "r"(bytes) : "memory");
  typename V::Weights w[kWeights];
  typename V::Sums sums[kSums];
#pragma GCC unroll 4
  for (int i = 0; i < kWeights; ++i) w[i] = V::weights(bytes + 64 * i);
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) sums[i] = V::zero();
  for (int64_t round = 0; round < rounds; ++round) {
    __asm__ volatile("" : : "r"(bytes) : "memory");  // the codes may have changed: no product is kept
#pragma GCC unroll 4
    for (int i = 0; i < kCodes; ++i) {
      const typename V::Codes x = V::spread(bytes + 8 * i);
#pragma GCC unroll 4
      for (int j = 0; j < kWeights; ++j)
        sums[i * kWeights + j] = V::dot(sums[i * kWeights + j], w[j], x);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) V::keep(sums[i]);
  return static_cast<double>(rounds) * kSums * V::kLanes * 8;
}

template <class V, int M, int NT>
void fill_tiles(Kernels& k) {
  k.micro[M][NT] = micro<V, M, NT>;
  if constexpr (NT > 1) fill_tiles<V, M, NT - 1>(k);
}

template <class V, int M>
void fill_rows(Kernels& k) {
  k.max_tiles[M] = V::max_tiles(M);
  fill_tiles<V, M, V::max_tiles(M)>(k);
  if constexpr (M > 1) fill_rows<V, M - 1>(k);
}

template <class V>
const Kernels* make_kernels() {
  static const Kernels kernels = [] {
    static_assert(V::kAloneRows >= V::kMaxRowGroup && V::kAloneRows <= kMaxRows);
    Kernels k{};
    k.max_rows = V::kMaxRowGroup;
    k.alone_rows = V::kAloneRows;
    k.row_unit = 1;
    k.cache_bytes = int64_t{8} << 20;
    k.words = V::kWords;
    k.quantize = quantize;
    k.scale = scale_block;
    k.finish = linear_detail::finish_block;
    k.peak = peak<V>;
    fill_rows<V, V::kAloneRows>(k);
    return k;
  }();
  return &kernels;
}

}  // namespace
}  // namespace pagemill::linear_int8_detail
