// AMX tiles behind a tiny interface, so that a kernel over them runs on the registers where the machine
// has them and in emulation (tiles_emulated.h) where it has not. Included by files that are compiled for
// AMX, or for a test of them; everything is in an unnamed namespace.
//
// A kernel takes a class T with static functions; tiles are named by number, 0 to 7:
//   T::configure(config)              set the shapes of all tiles of this thread; contents become zero
//   T::release()                      give the tile registers back
//   T::zero<C>()                      C = 0
//   T::load<C>(from, stride)          rows from memory, `stride` bytes apart
//   T::store<C>(to, stride)
//   T::dot_bf16<C, A, B>()            C += A @ B: rows of A are pairs along k, row r of B the pairs
//                                     (2r, 2r + 1) of all columns
//   T::dot_bytes<C, A, B>()           the same in int32: rows of A are signed bytes in fours along k, row
//                                     r of B unsigned ones, those of k = 4r..4r + 3 of all columns
#pragma once

#include <cstdint>

#if defined(PAGEMILL_EMULATED_TILES)
#include "common/tiles_emulated.h"
#endif

namespace pagemill {
namespace {

// What LDTILECFG reads: palette 1 has eight tiles of at most 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "the instruction reads 64 bytes");

// All eight tiles at their full size.
inline TileConfig full_tiles() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  return config;
}

#if defined(PAGEMILL_EMULATED_TILES)

using Tiles = EmulatedTiles;

#else

// The instructions themselves: GCC's intrinsics take numbers of tiles as text only, and GCC 12's tell the
// optimizer of 8 of the 64 bytes that a configuration has and of none that a tile load reads.
struct Tiles {
  static inline void configure(const TileConfig& config) {
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  static inline void release() { __asm__ volatile("tilerelease" ::); }
  template <int C>
  static inline void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(C));
  }
  template <int C>
  static inline void load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(C) : "memory");
  }
  template <int C>
  static inline void store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(C) : "memory");
  }
  template <int C, int A, int B>
  static inline void dot_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  template <int C, int A, int B>
  static inline void dot_bytes() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

#endif

}  // namespace
}  // namespace pagemill
