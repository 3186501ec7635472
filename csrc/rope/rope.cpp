#include "rope/rope.h"

#include <cmath>
#include <vector>

#include "common/dispatch.h"
#include "common/parallel.h"
#include "common/sizes.h"
#include "common/vec.h"
#include "rope/rope_kernels.h"

namespace pagemill {
namespace {

using namespace rope_detail;

using KernelsFn = const Kernels* (*)();
constexpr Table<KernelsFn> kTable = {{portable_kernels, PAGEMILL_IF_AVX2(avx2_kernels),
                                      PAGEMILL_IF_AVX512(avx512_kernels), nullptr, nullptr}};

// Fewer numbers than these are not worth waking other threads for.
constexpr int64_t kSerial = 1 << 14;
constexpr int64_t kSerialAngles = 1 << 10;

void put(float* to, float x) { *to = x; }
void put(bf16* to, float x) { *to = to_bf16(x); }

template <class T>
void fill_angles(const int64_t* positions, int64_t first, int64_t last, const float* inv_freq,
                 int64_t half, float scaling, T* cos, T* sin) {
  for (int64_t i = first; i < last; ++i) {
    const float position = static_cast<float>(positions[i]);
    for (int64_t j = 0; j < half; ++j) {
      const float angle = position * inv_freq[j];
      put(cos + i * half + j, std::cos(angle) * scaling);
      put(sin + i * half + j, std::sin(angle) * scaling);
    }
  }
}

}  // namespace

void rotate_heads(uintptr_t data, int64_t token_stride, int64_t tokens, int64_t num_heads,
                  int64_t head_dim, uintptr_t weight, float eps, float offset, uintptr_t cos,
                  uintptr_t sin, int64_t half, bool interleaved, int dtype) {
  constexpr const char* kOp = "rotate_heads";
  check_dtype(dtype, kOp);
  check(tokens >= 0 && num_heads >= 1 && head_dim >= 1, kOp, "sizes",
        "must be tokens >= 0, num_heads >= 1, head_dim >= 1");
  check(tokens <= 1 || token_stride >= num_heads * head_dim, kOp, "token_stride",
        "must be at least num_heads * head_dim");
  check((cos == 0) == (sin == 0), kOp, "cos and sin", "must both be given or neither");
  check(half >= 0 && 2 * half <= head_dim, kOp, "half", "must be 0 to head_dim / 2");
  if (tokens == 0 || (weight == 0 && (cos == 0 || half == 0))) return;
  check(data != 0, kOp, "heads", "must not be null");
  const Heads heads{reinterpret_cast<void*>(data), token_stride, num_heads, head_dim,
                    reinterpret_cast<const void*>(weight), eps, offset,
                    reinterpret_cast<const void*>(cos), reinterpret_cast<const void*>(sin), half,
                    interleaved};
  const HeadsFn rotate = pick(kTable)()->rotate[dtype];
  const bool serial = tokens * num_heads * head_dim < kSerial;
  parallel_for(tokens, serial ? tokens : 1, [&](int64_t first, int64_t last) {
    thread_local std::vector<float> room;
    if (static_cast<int64_t>(room.size()) < 2 * head_dim) room.resize(2 * head_dim);
    rotate(heads, first, last, room.data());
  });
}

void rope_angles(uintptr_t positions, int64_t count, uintptr_t inv_freq, int64_t half, float scaling,
                 uintptr_t cos, uintptr_t sin, int dtype) {
  constexpr const char* kOp = "rope_angles";
  check_dtype(dtype, kOp);
  check(count >= 0 && half >= 0, kOp, "sizes", "must be at least 0");
  if (count == 0 || half == 0) return;
  check(positions != 0 && inv_freq != 0 && cos != 0 && sin != 0, kOp, "arguments",
        "must not be null");
  const auto* where = reinterpret_cast<const int64_t*>(positions);
  const auto* frequencies = reinterpret_cast<const float*>(inv_freq);
  const bool serial = count * half < kSerialAngles;
  parallel_for(count, serial ? count : 1, [&](int64_t first, int64_t last) {
    if (dtype == 0)
      fill_angles(where, first, last, frequencies, half, scaling, reinterpret_cast<float*>(cos),
                  reinterpret_cast<float*>(sin));
    else
      fill_angles(where, first, last, frequencies, half, scaling, reinterpret_cast<bf16*>(cos),
                  reinterpret_cast<bf16*>(sin));
  });
}

}  // namespace pagemill
