// Weights into tiles, and rows back out of them.
#include <cstring>

#include "common/parallel.h"
#include "linear/linear.h"
#include "linear/linear_work.h"

namespace pagemill {

using namespace linear_detail;

void pack_linear(uintptr_t weight, int64_t rows, int64_t k, int64_t stride, uintptr_t packed,
                 int64_t tile_first, int64_t tile_step, int dtype) {
  check_dtype(dtype, "pack_linear");
  check(rows >= 0 && k >= 1, "pack_linear", "weight", "must be [rows >= 0, k >= 1]");
  check(stride >= k || rows <= 1, "pack_linear", "stride", "must be at least k");
  check(tile_first >= 0 && tile_step >= 1, "pack_linear", "tiles", "must begin at 0 or later");
  check(packed % 64 == 0 && packed != 0, "pack_linear", "packed", "must lie on 64 bytes");
  const int64_t item = item_bytes(dtype), depth = tile_depth(dtype);
  const int64_t k_tiles = ceil_div(k, depth);
  const char* from = reinterpret_cast<const char*>(weight);
  char* to = reinterpret_cast<char*>(packed);
  parallel_for(ceil_div(rows, kTile), 1, [=](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; ++tile) {
      char* stream = to + (tile_first + tile * tile_step) * k_tiles * kTileBytes;
      const int64_t n_here = least(kTile, rows - tile * kTile);
      for (int64_t kt = 0; kt < k_tiles; ++kt) {
        const int64_t bytes = least(depth, k - kt * depth) * item;
        char* block = stream + kt * kTileBytes;
        for (int64_t i = 0; i < kTile; ++i) {
          uint32_t line[16] = {};
          if (i < n_here) {
            std::memcpy(line, from + ((tile * kTile + i) * stride + kt * depth) * item,
                        static_cast<size_t>(bytes));
          }
          for (int r = 0; r < 16; ++r) std::memcpy(block + r * 64 + i * 4, &line[r], 4);
        }
      }
    }
  });
}

void touch_tiles(uintptr_t packed, int64_t tiles, int64_t k, int64_t grain, int dtype) {
  check_dtype(dtype, "touch_tiles");
  check(tiles >= 0 && k >= 1 && grain >= 1, "touch_tiles", "sizes", "must be positive");
  check(tiles == 0 || packed != 0, "touch_tiles", "packed", "must not be null");
  constexpr uintptr_t kPage = 4096;
  const uintptr_t tile = static_cast<uintptr_t>(ceil_div(k, tile_depth(dtype)) * kTileBytes);
  parallel_for(tiles, grain, [=](int64_t first, int64_t last) {
    const uintptr_t end = packed + static_cast<uintptr_t>(last) * tile;
    // The page that two parts share is the one's in which it begins.
    uintptr_t page = packed + static_cast<uintptr_t>(first) * tile;
    if (first > 0) page = (page + kPage - 1) / kPage * kPage;
    for (; page < end; page = page / kPage * kPage + kPage) *reinterpret_cast<volatile char*>(page) = 0;
  });
}

void linear_rows(uintptr_t ids, int64_t count, uintptr_t packed, int64_t n, int64_t k,
                 uintptr_t out, int dtype) {
  check_dtype(dtype, "linear_rows");
  check(n >= 1 && k >= 1 && count >= 0, "linear_rows", "sizes", "must be positive");
  const int64_t item = item_bytes(dtype), depth = tile_depth(dtype);
  const int64_t k_tiles = ceil_div(k, depth);
  const int64_t* rows = reinterpret_cast<const int64_t*>(ids);
  for (int64_t i = 0; i < count; ++i)
    check(rows[i] >= 0 && rows[i] < n, "linear_rows", "ids", "must be rows of the matrix");
  const char* from = reinterpret_cast<const char*>(packed);
  char* to = reinterpret_cast<char*>(out);
  parallel_for(count, 16, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const char* stream = from + rows[i] / kTile * k_tiles * kTileBytes + rows[i] % kTile * 4;
      char* row = to + i * k * item;
      const int64_t words = k * item / 4;
      for (int64_t w = 0; w < words; ++w) std::memcpy(row + w * 4, stream + w * 64, 4);
      if (k * item % 4 != 0) std::memcpy(row + words * 4, stream + words * 64, 2);
    }
  });
}

}  // namespace pagemill
