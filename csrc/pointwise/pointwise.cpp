#include "pointwise/pointwise.h"

#include "common/dispatch.h"
#include "common/parallel.h"
#include "common/sizes.h"
#include "pointwise/pointwise_kernels.h"

namespace pagemill {
namespace {

using namespace pointwise_detail;

using KernelsFn = const Kernels* (*)();
constexpr Table<KernelsFn> kTable = {{portable_kernels, PAGEMILL_IF_AVX2(avx2_kernels),
                                      PAGEMILL_IF_AVX512(avx512_kernels), nullptr, nullptr}};

// A thread takes at least so many numbers.
constexpr int64_t kGrain = 1 << 14;

template <class T>
void gather(const T* x, int64_t x_stride, int64_t first, int64_t last, const int64_t* order,
            int64_t columns, T* out) {
  for (int64_t i = first; i < last; ++i)
    for (int64_t j = 0; j < columns; ++j) out[i * columns + j] = x[i * x_stride + order[j]];
}

}  // namespace

void activate(uintptr_t x, int64_t count, int activation, int dtype) {
  check_dtype(dtype, "activate");
  check(activation >= 0 && activation < kActivations, "activate", "activation", "must be known");
  check(count >= 0 && (count == 0 || x != 0), "activate", "x", "must be count >= 0 numbers");
  const auto run = pick(kTable)()->activate[dtype][activation];
  const int64_t item = item_bytes(dtype);
  parallel_for(count, kGrain, [&](int64_t first, int64_t last) {
    run(reinterpret_cast<char*>(x) + first * item, last - first);
  });
}

void add(uintptr_t x, uintptr_t y, int64_t count, int dtype) {
  check_dtype(dtype, "add");
  check(count >= 0 && (count == 0 || (x != 0 && y != 0)), "add", "x and y",
        "must be count >= 0 numbers");
  const auto run = pick(kTable)()->add[dtype];
  const int64_t item = item_bytes(dtype);
  parallel_for(count, kGrain, [&](int64_t first, int64_t last) {
    run(reinterpret_cast<char*>(x) + first * item, reinterpret_cast<const char*>(y) + first * item,
        last - first);
  });
}

void add_rows(uintptr_t x, int64_t count, int64_t size, uintptr_t ids, int64_t offset,
              uintptr_t table, int64_t n, int dtype) {
  check_dtype(dtype, "add_rows");
  check(count >= 0 && size >= 1 && n >= 1, "add_rows", "sizes", "must be positive");
  check(count == 0 || (x != 0 && ids != 0 && table != 0), "add_rows", "x, ids and table",
        "must not be null");
  const int64_t* rows = reinterpret_cast<const int64_t*>(ids);
  for (int64_t i = 0; i < count; ++i)
    check(rows[i] >= -offset && rows[i] < n - offset, "add_rows", "ids",
          "must be rows of the table");
  const auto run = pick(kTable)()->add[dtype];
  const int64_t row_bytes = size * item_bytes(dtype);
  parallel_for(count, kGrain / size + 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      run(reinterpret_cast<char*>(x) + i * row_bytes,
          reinterpret_cast<const char*>(table) + (rows[i] + offset) * row_bytes, size);
  });
}

void gather_columns(uintptr_t x, int64_t x_stride, int64_t rows, int64_t k, uintptr_t order,
                    int64_t columns, uintptr_t out, int dtype) {
  check_dtype(dtype, "gather_columns");
  check(rows >= 0 && k >= 1 && columns >= 1, "gather_columns", "sizes", "must be positive");
  check(rows == 0 || (x != 0 && order != 0 && out != 0), "gather_columns", "x, order and out",
        "must not be null");
  const int64_t* from = reinterpret_cast<const int64_t*>(order);
  for (int64_t j = 0; j < columns; ++j)
    check(from[j] >= 0 && from[j] < k, "gather_columns", "order", "must be columns of x");
  parallel_for(rows, kGrain / columns + 1, [&](int64_t first, int64_t last) {
    if (dtype == 0) {
      gather(reinterpret_cast<const uint32_t*>(x), x_stride, first, last, from, columns,
             reinterpret_cast<uint32_t*>(out));
    } else {
      gather(reinterpret_cast<const uint16_t*>(x), x_stride, first, last, from, columns,
             reinterpret_cast<uint16_t*>(out));
    }
  });
}

}  // namespace pagemill
