// bfloat16 as bits, and its conversions: the same rounding everywhere (to nearest, ties to even).
//
// Everything here has internal linkage: the files of different instruction sets must not share code
// that was compiled for one of them.
#pragma once

#include <cstdint>
#include <cstring>

namespace pagemill {

// The bits of a bfloat16 number.
using bf16 = uint16_t;

// The element types that Python names by number; int8 is one of caches alone.
enum class Dtype : int { float32 = 0, bfloat16 = 1, int8 = 2 };

static inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

static inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40u);  // NaN
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<bf16>(bits >> 16);
}

}  // namespace pagemill
