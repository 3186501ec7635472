// Rows of a packed matrix as plain numbers: the embedding that shares a head's matrix.
#include <cstring>

#include "common/parallel.h"
#include "common/sizes.h"
#include "qlinear/qlinear_kernels.h"

namespace pagemill {
namespace {

using qlinear_detail::kHalf;
using qlinear_detail::kTile;

float from_half(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h & 0x7fffu) << 13;
  float sized;
  std::memcpy(&sized, &bits, sizeof sized);
  sized *= 0x1p112f;
  return h & 0x8000u ? -sized : sized;
}

float from_fp8(uint8_t byte) {
  const uint32_t bits = static_cast<uint32_t>(byte & 0x7fu) << 20;
  float sized;
  std::memcpy(&sized, &bits, sizeof sized);
  sized *= 0x1p120f;
  return byte & 0x80u ? -sized : sized;
}

// The number that input k's code stands for; `word` begins at the output's word of the tile's first line.
float value(const QMatrix& m, const char* word, int64_t k) {
  if (m.codec == static_cast<int>(Codec::int4)) {
    const int64_t nibble = k % 2 * 4 + k % 8 / 2;
    const uint8_t byte = static_cast<uint8_t>(word[k / 8 * 64 + nibble / 2]);
    return m.wide[nibble % 2 == 0 ? byte & 15 : byte >> 4];
  }
  const uint8_t byte = static_cast<uint8_t>(word[k / 4 * 64 + k % 2 * 2 + k % 4 / 2]);
  return m.codec == static_cast<int>(Codec::int8) ? static_cast<int8_t>(byte) : from_fp8(byte);
}

void one_row(const QMatrix& m, int64_t row, int dtype, char* to) {
  const int64_t tile = row / kTile, lane = row % kTile;
  const char* word = m.codes + tile * m.k_tiles * 2 * m.half_bytes + lane * 4;
  const float multiplier = m.multipliers[tile * kTile + lane];
  for (int64_t k = 0; k < m.k; ++k) {
    const int64_t at = (tile * m.groups + k / kHalf / m.group_halves) * kTile + lane;
    float w = value(m, word, k);
    if (m.offset == static_cast<int>(Offset::zero)) w -= from_half(m.offsets[at]);
    w *= from_half(m.scales[at]);
    if (m.offset == static_cast<int>(Offset::min)) w += from_half(m.offsets[at]);
    w *= multiplier;
    if (dtype == static_cast<int>(Dtype::float32)) {
      std::memcpy(to + k * 4, &w, 4);
    } else {
      const bf16 rounded = to_bf16(w);
      std::memcpy(to + k * 2, &rounded, 2);
    }
  }
}

}  // namespace

void qlinear_rows(const QMatrix& matrix, uintptr_t ids, int64_t count, uintptr_t out, int dtype) {
  check_dtype(dtype, "qlinear_rows");
  check(matrix.parts == 1, "qlinear_rows", "matrix", "must have one part");
  const int64_t* rows = reinterpret_cast<const int64_t*>(ids);
  for (int64_t i = 0; i < count; ++i)
    check(rows[i] >= 0 && rows[i] < matrix.n, "qlinear_rows", "ids", "must be rows of the matrix");
  char* to = reinterpret_cast<char*>(out);
  const int64_t bytes = matrix.k * item_bytes(dtype);
  parallel_for(count, 16, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) one_row(matrix, rows[i], dtype, to + i * bytes);
  });
}

}  // namespace pagemill
