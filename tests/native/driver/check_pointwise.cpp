#include <cmath>

#include "checks.h"
#include "pointwise/pointwise.h"

namespace driver {
namespace {

double exact(int activation, double x) {
  switch (activation) {
    case 0: return 0.5 * x * (1 + std::erf(x * std::sqrt(0.5)));
    case 1: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case 2: return x / (1 + std::exp(-x));
    case 3: return x / (1 + std::exp(-1.702 * x));
    case 4: return x > 0 ? x : 0;
    default: return x > 0 ? x * x : 0;
  }
}

void check_activations(Digest& digest, int dtype, int64_t count) {
  for (int activation = 0; activation < 6; ++activation) {
    Array x(dtype, count, 3);
    for (int64_t i = 0; i < count; ++i) x.set(i, static_cast<float>(4 * x.get(i)));
    const Array before(x);
    Array again(x), alone(dtype, 1);
    alone.set(0, static_cast<float>(x.get(0)));
    pagemill::set_num_threads(1);
    pagemill::activate(x.address(), count, activation, dtype);
    pagemill::activate(alone.address(), 1, activation, dtype);
    pagemill::set_num_threads(2);
    pagemill::activate(again.address(), count, activation, dtype);
    require(again.same(x, 0, 0, count), "activate: two threads change bits");
    require(alone.same(x, 0, 0, 1), "activate: a number alone has other bits");
    const double unit = dtype == 0 ? 1e-6 : 1.0 / 256;
    for (int64_t i = 0; i < count; ++i) {
      const double expected = exact(activation, before.get(i));
      require(std::fabs(x.get(i) - expected) <= unit * (0.5 + std::fabs(expected)),
              "activate: a wrong number");
    }
    digest.add(x.data(), static_cast<size_t>(x.bytes()));
  }
}

void check_sums(Digest& digest, int dtype) {
  constexpr int64_t kRows = 5, kSize = 37;
  Array x(dtype, kRows * kSize, 1), table(dtype, 4 * kSize, 2), y(dtype, kRows * kSize);
  const Array before(x);
  const int64_t ids[kRows] = {0, 2, 1, 1, 0};
  for (int64_t i = 0; i < kRows * kSize; ++i)
    y.set(i, static_cast<float>(table.get((ids[i / kSize] + 1) * kSize + i % kSize)));
  Array added(before);
  pagemill::add_rows(x.address(), kRows, kSize, reinterpret_cast<uintptr_t>(ids), 1, table.address(),
                     4, dtype);
  pagemill::add(added.address(), y.address(), kRows * kSize, dtype);
  require(added.same(x, 0, 0, kRows * kSize), "add_rows: not the sum with the rows");
  for (int64_t i = 0; i < kRows * kSize; ++i)
    require(std::fabs(x.get(i) - before.get(i) - y.get(i)) < (dtype == 0 ? 1e-6 : 1e-2),
            "add: a wrong sum");
  const int64_t order[3] = {36, 0, 36};
  Array gathered(dtype, kRows * 3);
  pagemill::gather_columns(x.address(), kSize, kRows, kSize, reinterpret_cast<uintptr_t>(order), 3,
                           gathered.address(), dtype);
  for (int64_t i = 0; i < kRows * 3; ++i)
    require(gathered.same(x, i, i / 3 * kSize + order[i % 3], 1), "gather_columns: a wrong number");
  digest.add(x.data(), static_cast<size_t>(x.bytes()));
}

}  // namespace

void check_pointwise(Digest& digest) {
  for (const int dtype : {0, 1}) {
    for (const int64_t count : {1, 16, 1000, 40001}) check_activations(digest, dtype, count);
    check_sums(digest, dtype);
  }
}

}  // namespace driver
