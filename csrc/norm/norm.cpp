#include "norm/norm.h"

#include "common/dispatch.h"
#include "common/parallel.h"
#include "common/sizes.h"
#include "norm/norm_kernels.h"

namespace pagemill {
namespace {

using namespace norm_detail;

using KernelsFn = const Kernels* (*)();
constexpr Table<KernelsFn> kTable = {{portable_kernels, PAGEMILL_IF_AVX2(avx2_kernels),
                                      PAGEMILL_IF_AVX512(avx512_kernels), nullptr, nullptr}};

// Fewer numbers than these are not worth waking other threads for.
constexpr int64_t kSerial = 1 << 15;

void check_rows(const char* op, const Rows& rows, int64_t count, int dtype) {
  check_dtype(dtype, op);
  check(count >= 0 && rows.size >= 1, op, "sizes", "must be rows >= 0, size >= 1");
  check(count == 0 || (rows.x != nullptr && rows.out != nullptr), op, "x and out",
        "must not be null");
}

void run(RowsFn fn, const Rows& rows, int64_t count) {
  const int64_t grain = count * rows.size < kSerial ? count : 1;
  parallel_for(count, grain > 0 ? grain : 1,
               [&](int64_t first, int64_t last) { fn(rows, first, last); });
}

}  // namespace

void rms_norm(uintptr_t x, int64_t x_stride, int64_t rows, int64_t size, uintptr_t weight, float eps,
              float offset, int dtype, uintptr_t residual, int64_t residual_stride, uintptr_t out,
              int64_t out_stride) {
  const Rows call{reinterpret_cast<const void*>(x), x_stride, size,
                  reinterpret_cast<const void*>(weight), nullptr, eps, offset,
                  reinterpret_cast<const void*>(residual), residual_stride,
                  reinterpret_cast<void*>(out), out_stride};
  check_rows("rms_norm", call, rows, dtype);
  check(weight != 0, "rms_norm", "weight", "must not be null");
  run(pick(kTable)()->rms_norm[dtype], call, rows);
}

void layer_norm(uintptr_t x, int64_t x_stride, int64_t rows, int64_t size, uintptr_t weight,
                uintptr_t bias, float eps, int dtype, uintptr_t out, int64_t out_stride) {
  const Rows call{reinterpret_cast<const void*>(x), x_stride, size,
                  reinterpret_cast<const void*>(weight), reinterpret_cast<const void*>(bias), eps,
                  0.0f, nullptr, 0, reinterpret_cast<void*>(out), out_stride};
  check_rows("layer_norm", call, rows, dtype);
  run(pick(kTable)()->layer_norm[dtype], call, rows);
}

void scale(uintptr_t x, int64_t count, float factor, int dtype) {
  check_dtype(dtype, "scale");
  check(count >= 0 && (count == 0 || x != 0), "scale", "x", "must be count >= 0 numbers");
  const auto run = pick(kTable)()->scale[dtype];
  const int64_t bytes = item_bytes(dtype);
  parallel_for(count, kSerial, [&](int64_t first, int64_t last) {
    run(reinterpret_cast<char*>(x) + first * bytes, last - first, factor);
  });
}

}  // namespace pagemill
