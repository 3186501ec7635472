// Plain codes into tiles, and numbers into plain codes.
#include <cstring>
#include <vector>

#include "common/dispatch.h"
#include "common/parallel.h"
#include "common/sizes.h"
#include "qlinear/qlinear_kernels.h"

namespace pagemill {
namespace {

using namespace qlinear_detail;

using QuantizeFn = void (*)(const QuantTable&, const float*, float*, uint8_t*);
using KernelsFn = const Kernels* (*)();
constexpr Table<KernelsFn> kTable = {{portable_kernels, PAGEMILL_IF_AVX2(avx2_kernels),
                                      PAGEMILL_IF_AVX512(avx512_kernels),
                                      PAGEMILL_IF_AVX512_BF16(avx512_bf16_kernels), nullptr}};

// 32 codes of one output, zeros past the last, as the words of its lane: one every 64 bytes.
void place(const uint8_t* codes, int64_t count, int bits, uint8_t* words) {
  uint8_t c[32] = {};
  std::memcpy(c, codes, static_cast<size_t>(count));
  if (bits == 8) {
    for (int line = 0; line < 8; ++line) {
      const uint8_t* from = c + line * 4;
      const uint8_t word[4] = {from[0], from[2], from[1], from[3]};
      std::memcpy(words + line * 64, word, 4);
    }
    return;
  }
  for (int line = 0; line < 4; ++line) {
    const uint8_t* f = c + line * 8;
    const auto two = [&](int low, int high) {
      return static_cast<uint8_t>((f[low] & 15) | (f[high] << 4));
    };
    const uint8_t word[4] = {two(0, 2), two(4, 6), two(1, 3), two(5, 7)};
    std::memcpy(words + line * 64, word, 4);
  }
}

}  // namespace

void qlinear_pack(uintptr_t codes, int64_t rows, int64_t k, int64_t stride, int bits,
                  uintptr_t packed, int64_t tile_first, int64_t tile_step) {
  check(bits == 4 || bits == 8, "qlinear_pack", "bits", "must be 4 or 8");
  check(rows >= 0 && k >= 1, "qlinear_pack", "codes", "must be [rows >= 0, k >= 1]");
  check(stride >= k || rows <= 1, "qlinear_pack", "stride", "must be at least k");
  check(tile_first >= 0 && tile_step >= 1, "qlinear_pack", "tiles", "must begin at 0 or later");
  check(packed != 0, "qlinear_pack", "packed", "must not be null");
  const uint8_t* from = reinterpret_cast<const uint8_t*>(codes);
  uint8_t* to = reinterpret_cast<uint8_t*>(packed);
  const int64_t k_tiles = ceil_div(k, 32), tile_bytes = 64 * bits;
  parallel_for(ceil_div(rows, kTile), 1, [=](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; ++tile) {
      uint8_t* stream = to + (tile_first + tile * tile_step) * k_tiles * tile_bytes;
      const int64_t here = rows - tile * kTile < kTile ? rows - tile * kTile : kTile;
      for (int64_t kt = 0; kt < k_tiles; ++kt) {
        const int64_t count = k - kt * 32 < 32 ? k - kt * 32 : 32;
        for (int64_t i = 0; i < here; ++i) {
          place(from + (tile * kTile + i) * stride + kt * 32, count, bits,
                stream + kt * tile_bytes + i * 4);
        }
      }
    }
  });
}

void qlinear_quantize(uintptr_t weight, int64_t rows, int64_t k, int64_t stride, int dtype,
                      const std::vector<int>& values, uintptr_t codes, uintptr_t scales) {
  check_dtype(dtype, "qlinear_quantize");
  check(rows >= 0 && k >= 1, "qlinear_quantize", "weight", "must be [rows >= 0, k >= 1]");
  check(values.size() == 16, "qlinear_quantize", "table", "must have 16 numbers");
  QuantTable table{};
  for (size_t i = 0; i < 16; ++i) table.values[i] = static_cast<float>(values[i]);
  for (int i = 0; i < 15; ++i) {
    check(table.values[i] < table.values[i + 1], "qlinear_quantize", "table", "must rise");
    table.steps[i] = table.values[i + 1] - table.values[i];
    table.middles[i] = 0.5f * (table.values[i + 1] + table.values[i]);
  }
  const QuantizeFn quantize = pick(kTable)()->quantize;
  const int64_t groups = ceil_div(k, kQuantized), item = item_bytes(dtype);
  const char* from = reinterpret_cast<const char*>(weight);
  uint8_t* to = reinterpret_cast<uint8_t*>(codes);
  float* scale = reinterpret_cast<float*>(scales);
  parallel_for(rows, 16, [=](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = g * kQuantized;
        const int64_t count = k - begin < kQuantized ? k - begin : kQuantized;
        const char* x = from + (row * stride + begin) * item;
        float numbers[kQuantized] = {};
        uint8_t found[kQuantized];
        if (dtype == 0) {
          std::memcpy(numbers, x, static_cast<size_t>(count * 4));
        } else {
          for (int64_t i = 0; i < count; ++i) {
            bf16 bits;
            std::memcpy(&bits, x + i * 2, 2);
            numbers[i] = to_float(bits);
          }
        }
        quantize(table, numbers, scale + row * groups + g, found);
        std::memcpy(to + row * k + begin, found, static_cast<size_t>(count));
      }
    }
  });
}

}  // namespace pagemill
