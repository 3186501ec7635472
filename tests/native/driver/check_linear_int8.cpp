#include <algorithm>
#include <cmath>

#include "checks.h"
#include "linear_int8/linear_int8.h"

namespace driver {
namespace {

using pagemill::Rounding;

struct Problem {
  int64_t m, n, k;
};

constexpr Problem kProblems[] = {{1, 16, 64}, {5, 1, 1}, {21, 33, 130}, {40, 50, 600}};
constexpr float kFixedScale = 1.0f / 64;
constexpr int kFixedZero = 3;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Codes, scales and both of their packed forms: as given, and quantized from the products.
struct Weights {
  int64_t n, k;
  std::vector<int8_t> codes;
  std::vector<float> scales;
  Array packed, packed_scales;  // bytes are counted in float32 numbers
  std::vector<int32_t> sums;

  Weights(int64_t rows, int64_t depth)
      : n(rows), k(depth), packed(0, ceil_div(rows, 16) * ceil_div(depth, 64) * 256),
        packed_scales(0, ceil_div(rows, 16) * 16),
        sums(static_cast<size_t>(ceil_div(rows, 16) * 16)) {
    Numbers numbers(5);
    for (int64_t i = 0; i < n * k; ++i)
      codes.push_back(static_cast<int8_t>(std::lrintf(numbers.next() * 127)));
    for (int64_t i = 0; i < n; ++i) {
      scales.push_back(0.01f + 0.005f * numbers.next());
      // A full-scale code a row, so that quantizing finds the scale again.
      codes[static_cast<size_t>(i * k)] = 127;
    }
    pagemill::pack_int8(reinterpret_cast<uintptr_t>(codes.data()), n, k, k,
                        reinterpret_cast<uintptr_t>(scales.data()), packed.address(),
                        packed_scales.address(), reinterpret_cast<uintptr_t>(sums.data()), 0, 1);
  }

  double at(int64_t row, int64_t i) const {
    return static_cast<double>(codes[static_cast<size_t>(row * k + i)]) *
           static_cast<double>(scales[static_cast<size_t>(row)]);
  }
};

// The float64 product with the true activations, and how far rounding to codes may take it.
void exact(const Weights& w, const Array& x, int64_t row, int64_t feature, Rounding rounding,
           double* value, double* reach) {
  double low = 0, high = 0, size = 0;
  *value = 0;
  for (int64_t i = 0; i < w.k; ++i) {
    double a = x.get(row * w.k + i);
    low = std::min(low, a);
    high = std::max(high, a);
    if (rounding == Rounding::fixed)
      a = (std::clamp(std::nearbyint(a / kFixedScale) + kFixedZero, -128.0, 127.0) - kFixedZero) *
          kFixedScale;
    *value += a * w.at(feature, i);
    size += std::fabs(w.at(feature, i));
  }
  double step = 0;
  if (rounding == Rounding::per_row) step = std::max(-low, high) / 127;
  if (rounding == Rounding::per_row_zero) step = 2 * (high - low) / 255;
  *reach = 0.51 * step * size + 1e-4 * (std::fabs(*value) + 1e-3 * size);
}

void run(const Weights& w, const Array& x, int64_t row, int64_t m, Rounding rounding, Array& out) {
  pagemill::linear_int8(x.at(row * w.k), w.k, m, x.dtype(), static_cast<int>(rounding),
                        kFixedScale, rounding == Rounding::fixed ? kFixedZero : 0,
                        w.packed.address(), w.packed_scales.address(),
                        reinterpret_cast<uintptr_t>(w.sums.data()), w.n, w.k, 0, 0, w.n,
                        out.address(), w.n, out.dtype(), 0);
}

void check_call(const Weights& w, int64_t m, int dtype, Rounding rounding, Digest& digest) {
  const Array x(dtype, m * w.k, 6);
  Array out(dtype, m * w.n), again(dtype, m * w.n), alone(dtype, w.n);
  pagemill::set_num_threads(1);
  run(w, x, 0, m, rounding, out);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < w.n; ++j) {
      double value, reach;
      exact(w, x, i, j, rounding, &value, &reach);
      if (dtype == 1) reach += 0x1p-8 * std::fabs(value);
      require(std::fabs(out.get(i * w.n + j) - value) <= reach, "linear_int8: a wrong product");
    }
  }
  digest.add(out.data(), static_cast<size_t>(out.bytes()));
  pagemill::set_num_threads(2);
  run(w, x, 0, m, rounding, again);
  require(again.same(out, 0, 0, m * w.n), "linear_int8: two threads change bits");
  for (int64_t i = 0; i < m; i += 3) {
    run(w, x, i, 1, rounding, alone);
    require(alone.same(out, 0, i * w.n, w.n), "linear_int8: a row alone has other bits");
  }
}

void check_rows_and_quantize(const Weights& w) {
  Array dense(0, w.n * w.k), rows(0, 3 * w.k);
  for (int64_t i = 0; i < w.n * w.k; ++i)
    dense.set(i, static_cast<float>(w.codes[static_cast<size_t>(i)]) *
                     w.scales[static_cast<size_t>(i / w.k)]);
  const std::vector<int64_t> ids{w.n - 1, 0, w.n / 2};
  const auto read_back = [&](const Array& packed, const Array& scales, double bound) {
    pagemill::linear_int8_rows(reinterpret_cast<uintptr_t>(ids.data()), 3, packed.address(),
                               scales.address(), w.n, w.k, rows.address(), 0);
    for (int64_t i = 0; i < 3 * w.k; ++i)
      require(std::fabs(rows.get(i) - dense.get(ids[static_cast<size_t>(i / w.k)] * w.k + i % w.k)) <=
                  bound,
              "linear_int8_rows: a row does not come back");
  };
  read_back(w.packed, w.packed_scales, 0);
  Array packed(0, w.packed.count()), scales(0, w.packed_scales.count());
  pagemill::quantize_int8(dense.address(), w.n, w.k, w.k, 0, packed.address(), scales.address(), 0,
                          1);
  read_back(packed, scales, 1e-6);
}

}  // namespace

void check_linear_int8(Digest& digest) {
  for (const Problem& p : kProblems) {
    const Weights weights(p.n, p.k);
    check_rows_and_quantize(weights);
    for (const int dtype : {0, 1})
      for (const Rounding rounding : {Rounding::per_row, Rounding::per_row_zero, Rounding::fixed})
        check_call(weights, p.m, dtype, rounding, digest);
  }
  require(pagemill::linear_int8_scratch_bytes() > 0, "linear_int8_scratch_bytes is nothing");
  require(pagemill::peak_int8_ops(10) > 0, "peak_int8_ops does nothing");
}

}  // namespace driver
