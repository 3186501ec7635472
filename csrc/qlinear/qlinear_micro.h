// The inner loops of `qlinear`, written once over a vector type V and compiled once an instruction set.
// Included by the qlinear_<isa>.cpp files only; everything is in an unnamed namespace.
//
// V gives: Vec (floats), kLanes, zero(), load(float*), store(float*, Vec), set1(float), fma(a, b, c) =
// a * b + c, half(uint16_t*): kLanes float16 numbers, and_xor(w, mask, flip) = (w & mask) ^ flip; Nibbles
// with nibbles(line, matrix) and value(nibbles, i): what the nibble i of each word stands for. With
// kPairs: Raw, raw(p), pair(p): a pair spread over all lanes, dot(c, a, b), and pair_of_nibbles,
// pair_of_fp8 (see there).
#pragma once

#include "linear/epilogue_loops.h"
#include "qlinear/qlinear_kernels.h"

#define PAGEMILL_INLINE inline __attribute__((always_inline))

namespace pagemill::qlinear_detail {
namespace {

using linear_detail::finish_block;

// Vectors of one word a lane as the compiler knows them, for each length: it takes no length that hangs on
// a template.
template <int lanes>
struct Vectors;
#define PAGEMILL_VECTORS(lanes)                                             \
  template <>                                                               \
  struct Vectors<lanes> {                                                   \
    typedef uint32_t Words __attribute__((vector_size(lanes * 4)));         \
    typedef float Floats __attribute__((vector_size(lanes * 4)));           \
    typedef uint16_t Halves __attribute__((vector_size(lanes * 2)));        \
    static PAGEMILL_INLINE Words words(Halves v) {                          \
      return __builtin_convertvector(v, Words);                             \
    }                                                                       \
  };
PAGEMILL_VECTORS(4)
PAGEMILL_VECTORS(8)
PAGEMILL_VECTORS(16)
#undef PAGEMILL_VECTORS

template <int kLanes>
struct Of : Vectors<kLanes> {
  using typename Vectors<kLanes>::Words;
  using typename Vectors<kLanes>::Floats;
  using typename Vectors<kLanes>::Halves;

  static PAGEMILL_INLINE Words line(const char* p) {
    Words w;
    __builtin_memcpy(&w, p, sizeof w);
    return w;
  }
  // Byte i of each word, as a signed number: put where a large float32 has its ones, sign flipped.
  template <class V>
  static PAGEMILL_INLINE Floats int8_value(Words w, int i) {
    if (i >= 2) w >>= 16;
    const Words bits = i % 2 == 0 ? V::and_xor(w, 0xffu, 0x4b000080u)      // 2^23 + 128 + byte
                                  : V::and_xor(w, 0xff00u, 0x47008000u);  // 2^15 + 128 + byte
    return reinterpret_cast<Floats>(bits) - (i % 2 == 0 ? 0x1p23f + 128.0f : 0x1p15f + 128.0f);
  }
  // The same as float8 e4m3: its bits in the places of a float32's, which is then 2^120 too small.
  static PAGEMILL_INLINE Floats fp8_value(Words w, int i) {
    const Words moved = i == 3 ? w : w << (24 - 8 * i);
    const Floats small = reinterpret_cast<Floats>((moved & 0x7f000000u) >> 4);
    const Floats sized = small * 0x1p120f;
    return reinterpret_cast<Floats>(reinterpret_cast<Words>(sized) | (moved & 0x80000000u));
  }
  // kLanes float16 numbers (finite ones), in the same way.
  static PAGEMILL_INLINE Floats half(const uint16_t* p) {
    Halves h;
    __builtin_memcpy(&h, p, sizeof h);
    const Words w = Vectors<kLanes>::words(h);
    const Floats sized = reinterpret_cast<Floats>((w & 0x7fffu) << 13) * 0x1p112f;
    return reinterpret_cast<Floats>(reinterpret_cast<Words>(sized) | ((w & 0x8000u) << 16));
  }
};

}  // namespace
}  // namespace pagemill::qlinear_detail

#include "qlinear/qlinear_quantize.h"

namespace pagemill::qlinear_detail {
namespace {

// A Source reads 8 inputs of kLanes outputs at a time: `State` is what is loaded once, `wide(state, k)`
// the floats of input k, `pair(state, s)` the bfloat16 pair of inputs 2s and 2s + 1.

template <class V>
struct Int4 {
  static constexpr int64_t kUnitBytes = 64;
  static constexpr bool kDecoded = false;
  using State = typename V::Nibbles;
  static PAGEMILL_INLINE State load(const char* p, const QMatrix& m) {
    return V::nibbles(Of<V::kLanes>::line(p), m);
  }
  static PAGEMILL_INLINE typename V::Vec wide(const State& s, int k) {
    return V::value(s, k % 2 * 4 + k / 2);
  }
};

template <class V, bool kFloat>
struct Bytes {
  static constexpr int64_t kUnitBytes = 128;
  static constexpr bool kDecoded = false;
  struct State {
    typename Of<V::kLanes>::Words lines[2];
  };
  static PAGEMILL_INLINE State load(const char* p, const QMatrix&) {
    return {{Of<V::kLanes>::line(p), Of<V::kLanes>::line(p + 64)}};
  }
  static PAGEMILL_INLINE typename V::Vec wide(const State& s, int k) {
    const int byte = k % 2 * 2 + k % 4 / 2;
    const auto line = s.lines[k / 4];
    return reinterpret_cast<typename V::Vec>(kFloat ? Of<V::kLanes>::fp8_value(line, byte)
                                                    : Of<V::kLanes>::template int8_value<V>(line, byte));
  }
};

template <class V>
struct Decoded {
  static constexpr int64_t kUnitBytes = 8 * 64;
  static constexpr bool kDecoded = true;
  using State = const char*;
  static PAGEMILL_INLINE State load(const char* p, const QMatrix&) { return p; }
  static PAGEMILL_INLINE typename V::Vec wide(State p, int k) {
    return V::load(reinterpret_cast<const float*>(p + k * 64));
  }
};

// Sources of bfloat16 pairs; V has 16 lanes.

template <class V>
struct Int4Pairs {
  static constexpr int64_t kUnitBytes = 64;
  static constexpr bool kDecoded = false;
  struct State {
    typename Of<V::kLanes>::Words line;
    typename Of<V::kLanes>::Words table;
  };
  static PAGEMILL_INLINE State load(const char* p, const QMatrix& m) {
    return {Of<V::kLanes>::line(p), Of<V::kLanes>::line(reinterpret_cast<const char*>(m.pairs))};
  }
  static PAGEMILL_INLINE typename V::Raw pair(const State& s, int i) {
    return V::pair_of_nibbles(i == 0 ? s.line : s.line >> (4 * i), s.table);
  }
};

template <class V, bool kFloat>
struct BytesPairs {
  static constexpr int64_t kUnitBytes = 128;
  static constexpr bool kDecoded = false;
  using State = typename Bytes<V, kFloat>::State;
  static PAGEMILL_INLINE State load(const char* p, const QMatrix& m) {
    return Bytes<V, kFloat>::load(p, m);
  }
  static PAGEMILL_INLINE typename V::Raw pair(const State& s, int i) {
    using Words = typename Of<V::kLanes>::Words;
    const Words line = s.lines[i / 2];
    if constexpr (kFloat) return V::pair_of_fp8(line, i % 2);
    // Whole numbers below 257 fill the upper half of a float32 alone.
    const Words even = reinterpret_cast<Words>(Of<V::kLanes>::template int8_value<V>(line, i % 2));
    const Words odd = reinterpret_cast<Words>(Of<V::kLanes>::template int8_value<V>(line, 2 + i % 2));
    return reinterpret_cast<typename V::Raw>((even >> 16) | odd);
  }
};

template <class V>
struct DecodedPairs {
  static constexpr int64_t kUnitBytes = 4 * 64;
  static constexpr bool kDecoded = true;
  using State = const char*;
  static PAGEMILL_INLINE State load(const char* p, const QMatrix&) { return p; }
  static PAGEMILL_INLINE typename V::Raw pair(State p, int s) { return V::raw(p + s * 64); }
};

// 8 inputs of M rows and NT tiles, float32.
template <class V, class Source, int M, int NT, bool kAsPairs>
PAGEMILL_INLINE void unit(typename V::Vec (&acc)[M][NT * (kTile / V::kLanes)], const Block& block,
                          const char* b, const char* a) {
  constexpr int kVecs = kTile / V::kLanes;
  typename Source::State states[NT * kVecs];
#pragma GCC unroll 16
  for (int j = 0; j < NT * kVecs; ++j)
    states[j] = Source::load(b + j / kVecs * block.b_stride + j % kVecs * V::kLanes * 4,
                             *block.matrix);
  if constexpr (kAsPairs) {
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      typename V::Raw w[NT];
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t) w[t] = Source::pair(states[t], s);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const auto x = V::pair(reinterpret_cast<const uint32_t*>(a + i * block.a_stride) + s);
#pragma GCC unroll 16
        for (int t = 0; t < NT; ++t) acc[i][t] = V::dot(acc[i][t], x, w[t]);
      }
    }
  } else {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      typename V::Vec w[NT * kVecs];
#pragma GCC unroll 16
      for (int j = 0; j < NT * kVecs; ++j) w[j] = Source::wide(states[j], k);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const auto x = V::set1(reinterpret_cast<const float*>(a + i * block.a_stride)[k]);
#pragma GCC unroll 16
        for (int j = 0; j < NT * kVecs; ++j) acc[i][j] = V::fma(x, w[j], acc[i][j]);
      }
    }
  }
}

// Whether the totals have registers beside a group's sums; else they wait in the first cache.
template <class V, int M, int NT>
constexpr bool kTotalsStay = M* NT*(kTile / V::kLanes) <= V::kMostTotals;

// Add a whole group's sums to the totals.
template <class V, int M, int NT, Offset kOffset>
PAGEMILL_INLINE void fold_as(const typename V::Vec (&acc)[M][NT * (kTile / V::kLanes)],
                             typename V::Vec (&totals)[M][NT * (kTile / V::kLanes)],
                             const Block& block, int64_t group) {
  constexpr int kVecs = kTile / V::kLanes;
  using Vec = typename V::Vec;
  const int64_t stride = block.matrix->groups * kTile;
#pragma GCC unroll 16
  for (int j = 0; j < NT * kVecs; ++j) {
    const int64_t at = j / kVecs * stride + group * kTile + j % kVecs * V::kLanes;
    const Vec scale = V::half(block.scales + at);
    Vec add = V::zero();
    __builtin_prefetch(block.scales + at + 8 * kTile);
    if constexpr (kOffset != Offset::none) {
      add = V::half(block.offsets + at);
      __builtin_prefetch(block.offsets + at + 8 * kTile);
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      float* c = block.totals + i * block.c_stride + j * V::kLanes;
      Vec total = kTotalsStay<V, M, NT> ? totals[i][j] : V::load(c);
      if constexpr (kOffset == Offset::none) {
        total = V::fma(acc[i][j], scale, total);
      } else {
        const float x = block.x_sums[i * block.matrix->groups + group];
        if constexpr (kOffset == Offset::min) {
          total = V::fma(V::set1(x), add, V::fma(acc[i][j], scale, total));
        } else {
          total = V::fma(V::fma(V::set1(-x), add, acc[i][j]), scale, total);
        }
      }
      if constexpr (kTotalsStay<V, M, NT>) {
        totals[i][j] = total;
      } else {
        V::store(c, total);
      }
    }
  }
}

template <class V, int M, int NT>
PAGEMILL_INLINE void fold(const typename V::Vec (&acc)[M][NT * (kTile / V::kLanes)],
                          typename V::Vec (&totals)[M][NT * (kTile / V::kLanes)],
                          const Block& block, int64_t group) {
  if (block.matrix->offset == static_cast<int>(Offset::none)) {
    fold_as<V, M, NT, Offset::none>(acc, totals, block, group);
  } else if (block.matrix->offset == static_cast<int>(Offset::min)) {
    fold_as<V, M, NT, Offset::min>(acc, totals, block, group);
  } else {
    fold_as<V, M, NT, Offset::zero>(acc, totals, block, group);
  }
}

template <class V, class Source, int M, int NT, bool kAsPairs>
void micro(const Block& block) {
  constexpr int kVecs = kTile / V::kLanes;
  constexpr int64_t kHalfBytes = 2 * Source::kUnitBytes;
  constexpr int64_t kHalfA = kHalf * (kAsPairs ? 2 : 4);
  // Codes come from memory: asked for this many halves early, past the end of K in the next group of tiles.
  constexpr int64_t kAhead = 1024 / kHalfBytes;
  const QMatrix& matrix = *block.matrix;
  const char *a = block.a, *b = block.b;
  int64_t left = block.left, group = 0;
  typename V::Vec totals[M][NT * kVecs];
  if constexpr (kTotalsStay<V, M, NT>) {
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < NT * kVecs; ++j)
        totals[i][j] = V::load(block.totals + i * block.c_stride + j * V::kLanes);
  }
  bool resume = block.resume;
  for (int64_t h = 0; h < block.halves;) {
    typename V::Vec acc[M][NT * kVecs];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < NT * kVecs; ++j)
        acc[i][j] =
            resume ? V::load(block.partial + i * block.c_stride + j * V::kLanes) : V::zero();
    const int64_t part = left < block.halves - h ? left : block.halves - h;
    for (const int64_t end = h + part; h < end; ++h, a += kHalfA, b += kHalfBytes) {
      if constexpr (!Source::kDecoded) {
        const int64_t ahead =
            kAhead * kHalfBytes + (h + kAhead < block.to_end ? 0 : (NT - 1) * block.b_stride);
#pragma GCC unroll 16
        for (int t = 0; t < NT; ++t)
#pragma GCC unroll 4
          for (int line = 0; line < kHalfBytes / 64; ++line)
            __builtin_prefetch(b + t * block.b_stride + line * 64 + ahead);
      }
      unit<V, Source, M, NT, kAsPairs>(acc, block, b, a);
      unit<V, Source, M, NT, kAsPairs>(acc, block, b + Source::kUnitBytes, a + kHalfA / 2);
    }
    left -= part;
    resume = false;
    if (left == 0) {
      fold<V, M, NT>(acc, totals, block, group);
      // The last group may end early, with K.
      left = matrix.group_halves < block.to_end - h ? matrix.group_halves : block.to_end - h;
      ++group;
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int j = 0; j < NT * kVecs; ++j)
          V::store(block.partial + i * block.c_stride + j * V::kLanes, acc[i][j]);
    }
  }
  if constexpr (kTotalsStay<V, M, NT>) {
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < NT * kVecs; ++j)
        V::store(block.totals + i * block.c_stride + j * V::kLanes, totals[i][j]);
  }
}

// One row alone, one tile: kGroups groups side by side, each summed up from zero; then they are added in
// order, so the bits are those of `micro`. Codes are one stream through the whole matrix, which with short
// rows comes faster from memory than the streams of several tiles, and needs no software prefetches.
template <class V, class Source, bool kAsPairs, int kGroups>
void micro_alone(const Block& block) {
  constexpr int kVecs = kTile / V::kLanes;
  constexpr int64_t kHalfA = kHalf * (kAsPairs ? 2 : 4);
  const QMatrix& matrix = *block.matrix;
  const int64_t halves = matrix.group_halves;
  const int64_t group_bytes = halves * 2 * Source::kUnitBytes, group_a = halves * kHalfA;
  const int64_t whole = block.halves / halves / kGroups * kGroups;
  Block rest = block;
  typename V::Vec totals[1][kVecs];
#pragma GCC unroll 16
  for (int v = 0; v < kVecs; ++v) totals[0][v] = V::load(block.totals + v * V::kLanes);
  for (int64_t group = 0; group < whole; group += kGroups) {
    typename V::Vec acc[kGroups][1][kVecs];
#pragma GCC unroll 16
    for (int g = 0; g < kGroups; ++g)
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) acc[g][0][v] = V::zero();
    for (int64_t u = 0; u < 2 * halves; ++u) {
#pragma GCC unroll 16
      for (int g = 0; g < kGroups; ++g)
        unit<V, Source, 1, 1, kAsPairs>(acc[g], block,
                                        rest.b + g * group_bytes + u * Source::kUnitBytes,
                                        rest.a + g * group_a + u * (kHalfA / 2));
    }
#pragma GCC unroll 16
    for (int g = 0; g < kGroups; ++g) fold<V, 1, 1>(acc[g], totals, block, group + g);
    rest.b += kGroups * group_bytes;
    rest.a += kGroups * group_a;
  }
#pragma GCC unroll 16
  for (int v = 0; v < kVecs; ++v) V::store(block.totals + v * V::kLanes, totals[0][v]);
  if (whole * halves == block.halves) return;
  rest.scales += whole * kTile;
  if (rest.offsets != nullptr) rest.offsets += whole * kTile;
  if (rest.x_sums != nullptr) rest.x_sums += whole;
  rest.halves -= whole * halves;
  rest.to_end -= whole * halves;
  rest.left = halves < rest.to_end ? halves : rest.to_end;
  micro<V, Source, 1, 1, kAsPairs>(rest);
}

template <class V, class Source, bool kAsPairs>
void unpack(const QMatrix& matrix, const char* codes, int64_t halves, char* to) {
  constexpr int kVecs = kTile / V::kLanes;
  for (int64_t u = 0; u < 2 * halves; ++u, codes += Source::kUnitBytes) {
    // The next block of these tiles.
    for (int64_t line = 0; line < Source::kUnitBytes; line += 64)
      __builtin_prefetch(codes + line + halves * 2 * Source::kUnitBytes, 0, 2);
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) {
      const auto state = Source::load(codes + v * V::kLanes * 4, matrix);
      if constexpr (kAsPairs) {
#pragma GCC unroll 4
        for (int s = 0; s < 4; ++s) {
          const auto pair = Source::pair(state, s);
          __builtin_memcpy(to + s * 64, &pair, sizeof pair);
        }
      } else {
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k)
          V::store(reinterpret_cast<float*>(to + k * 64) + v * V::kLanes, Source::wide(state, k));
      }
    }
    to += kAsPairs ? 4 * 64 : 8 * 64;
  }
}

template <class V, class Source, bool kAsPairs, int M>
void fill_rows(MicroFn (&to)[kMaxRows + 1][2]) {
  constexpr int kTiles = Source::kDecoded ? V::decoded_tiles(kAsPairs) : V::direct_tiles(M);
  to[M][0] = micro<V, Source, M, 1, kAsPairs>;
  to[M][1] = micro<V, Source, M, kTiles, kAsPairs>;
  if constexpr (M > 1) fill_rows<V, Source, kAsPairs, M - 1>(to);
}

template <class V, class Source, bool kAsPairs>
void fill_codec(Kernels& k, Codec codec) {
  const int c = static_cast<int>(codec);
  constexpr int kRows = kAsPairs ? V::kDirectRows : V::kDirectWideRows;
  fill_rows<V, Source, kAsPairs, kRows>(k.direct[c][kAsPairs]);
  if constexpr (V::kGroupsAlone > 1) k.alone[c][kAsPairs] = micro_alone<V, Source, kAsPairs, V::kGroupsAlone>;
  k.unpack[c][kAsPairs] = unpack<V, Source, kAsPairs>;
}

template <class V>
const Kernels* make_kernels() {
  static const Kernels kernels = [] {
    Kernels k{};
    k.pairs = V::kPairs;
    k.direct_rows[0] = V::kDirectWideRows;
    k.direct_rows[1] = V::kDirectRows;
    k.finish = finish_block;
    k.quantize = quantize_group<V>;
    for (int pairs = 0; pairs < 2; ++pairs) {
      k.decoded_tiles[pairs] = V::decoded_tiles(pairs == 1);
      for (int m = 1; m <= k.direct_rows[pairs]; ++m) k.direct_tiles[pairs][m] = V::direct_tiles(m);
    }
    fill_codec<V, Int4<V>, false>(k, Codec::int4);
    fill_codec<V, Bytes<V, false>, false>(k, Codec::int8);
    fill_codec<V, Bytes<V, true>, false>(k, Codec::fp8);
    k.max_rows[0] = V::kWideRowGroup;
    k.max_rows[1] = V::kMaxRowGroup;
    fill_rows<V, Decoded<V>, false, V::kWideRowGroup>(k.decoded[0]);
    if constexpr (V::kPairs) {
      fill_codec<V, Int4Pairs<V>, true>(k, Codec::int4);
      fill_codec<V, BytesPairs<V, false>, true>(k, Codec::int8);
      fill_codec<V, BytesPairs<V, true>, true>(k, Codec::fp8);
      fill_rows<V, DecodedPairs<V>, true, V::kMaxRowGroup>(k.decoded[1]);
    }
    return k;
  }();
  return &kernels;
}

}  // namespace
}  // namespace pagemill::qlinear_detail
