// The tile registers of AMX in plain C++, after the operation sections of Intel's Software Developer's
// Manual, volume 2 (LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBF16PS, TDPBSUD). For tests on machines without
// AMX; what the instructions would answer with a fault ends the process and says why.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace pagemill {
namespace {

class TileRegisters {
 public:
  // Take the 64 bytes that LDTILECFG reads; contents become zero.
  void configure(const void* config) {
    const uint8_t* bytes = static_cast<const uint8_t*>(config);
    std::memset(data_, 0, sizeof data_);
    configured_ = bytes[0] != 0;
    if (!configured_) return;
    need(bytes[0] == 1, "palette is 0 or 1");
    for (int i = 2; i < 16; ++i) need(bytes[i] == 0, "reserved bytes are zero");
    for (int i = 0; i < 16; ++i) {
      uint16_t row_bytes;
      std::memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
      const uint8_t rows = bytes[48 + i];
      need(row_bytes <= 64 && rows <= 16, "a tile has at most 16 rows of 64 bytes");
      need((row_bytes == 0) == (rows == 0), "a tile has rows and columns or neither");
      need(i < 8 || rows == 0, "there are eight tiles");
      if (i < 8) {
        row_bytes_[i] = row_bytes;
        rows_[i] = rows;
      }
    }
  }

  void release() {
    std::memset(data_, 0, sizeof data_);
    configured_ = false;
  }

  void zero(int tile) {
    check(tile);
    std::memset(data_[tile], 0, sizeof data_[tile]);
  }

  void load(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int r = 0; r < rows_[tile]; ++r)
      std::memcpy(data_[tile][r], static_cast<const char*>(from) + r * stride, row_bytes_[tile]);
  }

  void store(int tile, void* to, int64_t stride) const {
    check(tile);
    for (int r = 0; r < rows_[tile]; ++r)
      std::memcpy(static_cast<char*>(to) + r * stride, data_[tile][r], row_bytes_[tile]);
  }

  // c += a @ b, signed bytes times unsigned ones; int32 sums wrap around.
  void dot_bytes(int c, int a, int b) {
    need_operands(c, a, b);
    const int fours = row_bytes_[a] / 4, columns = row_bytes_[c] / 4;
    for (int m = 0; m < rows_[c]; ++m) {
      uint32_t total[16] = {};
      std::memcpy(total, data_[c][m], row_bytes_[c]);
      for (int k = 0; k < fours; ++k)
        for (int n = 0; n < columns; ++n)
          for (int i = 0; i < 4; ++i)
            total[n] += static_cast<uint32_t>(static_cast<int8_t>(data_[a][m][4 * k + i]) *
                                              data_[b][k][4 * n + i]);
      std::memset(data_[c][m], 0, sizeof data_[c][m]);
      std::memcpy(data_[c][m], total, row_bytes_[c]);
    }
  }

  // c += a @ b. Of each sum, the first and the second numbers of the pairs are added up apart, from
  // zero, by fused multiply-adds in the order of k; then the two, and then c.
  void dot_bf16(int c, int a, int b) {
    need_operands(c, a, b);
    const int pairs = row_bytes_[a] / 4, columns = row_bytes_[c] / 4;
    float weights[16][2][16] = {};
    for (int k = 0; k < pairs; ++k)
      for (int half = 0; half < 2; ++half)
        for (int n = 0; n < columns; ++n)
          weights[k][half][n] = half_at(data_[b][k], 2 * n + half);
    for (int m = 0; m < rows_[c]; ++m) {
      float sums[2][16] = {}, total[16] = {};
      for (int k = 0; k < pairs; ++k)
        for (int half = 0; half < 2; ++half)
          add_products(half_at(data_[a][m], 2 * k + half), weights[k][half], sums[half]);
      std::memcpy(total, data_[c][m], row_bytes_[c]);
      for (int n = 0; n < columns; ++n)
        total[n] = flush(flush(total[n]) + flush(sums[0][n] + sums[1][n]));
      std::memset(data_[c][m], 0, sizeof data_[c][m]);
      std::memcpy(data_[c][m], total, row_bytes_[c]);
    }
  }

 private:
  static constexpr float kLeastNormal = 1.17549435e-38f;

  static void need(bool ok, const char* rule) {
    if (ok) return;
    std::fprintf(stderr, "tiles: %s\n", rule);
    std::abort();
  }
  void check(int tile) const {
    need(configured_ && tile >= 0 && tile < 8 && rows_[tile] > 0, "a tile in use is configured");
  }

  void need_operands(int c, int a, int b) const {
    check(c), check(a), check(b);
    need(c != a && c != b && a != b, "the three tiles differ");
    need(rows_[c] == rows_[a] && row_bytes_[c] == row_bytes_[b], "the sums fit the operands");
    need(row_bytes_[a] % 4 == 0 && row_bytes_[c] % 4 == 0 && row_bytes_[a] / 4 == rows_[b],
         "the operands fit each other");
  }

  // Numbers below the normal ones count as zero, on the way in and on the way out.
  static float flush(float x) { return std::fabs(x) < kLeastNormal ? std::copysign(0.0f, x) : x; }

  static float half_at(const uint8_t* row, int i) {
    uint16_t half;
    std::memcpy(&half, row + 2 * i, 2);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return flush(x);
  }

  // sums[n] = x * w[n] + sums[n], rounded once.
  static void add_products(float x, const float* w, float* sums) {
    // The product of two such numbers is exact, unless it leaves float's range: then a plain sum of the
    // rounded product is the fused one.
    int inexact = 0;
    for (int n = 0; n < 16; ++n) {
      const float size = std::fabs(x * w[n]);
      inexact |= !(size > 1e-30f && size < 1e38f) & !(x == 0.0f) & !(w[n] == 0.0f);
    }
    if (inexact) {
      for (int n = 0; n < 16; ++n) sums[n] = flush(std::fma(x, w[n], sums[n]));
    } else {
      for (int n = 0; n < 16; ++n) sums[n] = flush(sums[n] + x * w[n]);
    }
  }

  bool configured_ = false;
  uint16_t row_bytes_[8] = {};
  uint8_t rows_[8] = {};
  uint8_t data_[8][16][64] = {};
};

// This thread's.
inline TileRegisters& tile_registers() {
  thread_local TileRegisters registers;
  return registers;
}

// The interface of tiles.h.
struct EmulatedTiles {
  template <class Config>
  static void configure(const Config& config) {
    tile_registers().configure(&config);
  }
  static void release() { tile_registers().release(); }
  template <int C>
  static void zero() {
    tile_registers().zero(C);
  }
  template <int C>
  static void load(const void* from, int64_t stride) {
    tile_registers().load(C, from, stride);
  }
  template <int C>
  static void store(void* to, int64_t stride) {
    tile_registers().store(C, to, stride);
  }
  template <int C, int A, int B>
  static void dot_bf16() {
    tile_registers().dot_bf16(C, A, B);
  }
  template <int C, int A, int B>
  static void dot_bytes() {
    tile_registers().dot_bytes(C, A, B);
  }
};

}  // namespace
}  // namespace pagemill
