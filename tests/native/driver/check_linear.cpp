#include <cmath>

#include "checks.h"
#include "linear/linear.h"

namespace driver {
namespace {

struct Problem {
  int64_t m, n, k;
};

// Tiles that are whole, cut, single; several blocks along k; rows for every row group.
constexpr Problem kProblems[] = {{1, 16, 32},  {5, 1, 1},     {3, 33, 97},  {37, 40, 330},
                                 {1, 100, 513}, {70, 17, 64}, {12, 160, 31}};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t packed_count(int dtype, int64_t n, int64_t k) {
  const int64_t depth = dtype == 0 ? 16 : 32;
  return ceil_div(n, 16) * ceil_div(k, depth) * 16 * depth;
}

struct Linear {
  int dtype;
  int64_t n, k;
  bool gated;
  Array weight, packed, bias;  // of a gated layer gate rows, then up rows

  Linear(int type, const Problem& p, bool is_gated)
      : dtype(type), n(p.n), k(p.k), gated(is_gated),
        weight(type, (is_gated ? 2 : 1) * p.n * p.k, 1),
        packed(type, (is_gated ? 2 : 1) * packed_count(type, p.n, p.k)),
        bias(type, (is_gated ? 2 : 1) * p.n, 2) {
    const int64_t tiles = (n + 15) / 16 * (gated ? 2 : 1);
    pagemill::touch_tiles(packed.address(), tiles, k, 1, dtype);
    for (int part = 0; part < (gated ? 2 : 1); ++part)
      pagemill::pack_linear(weight.at(part * n * k), n, k, k, packed.address(), part,
                            gated ? 2 : 1, dtype);
  }

  void run(const Array& x, int64_t row, int64_t m, const Array* residual, Array& out,
           int epilogue) const {
    if (residual != nullptr)
      std::memcpy(reinterpret_cast<void*>(out.address()), residual->data() + row * n * out.item(),
                  static_cast<size_t>(m * n * out.item()));
    pagemill::linear(x.at(row * k), k, m, packed.address(), n, k, dtype, bias.address(),
                     residual != nullptr ? out.address() : 0, n, out.address(), n, out.dtype(),
                     epilogue);
  }

  double sum(const Array& x, int64_t row, int64_t feature, double* size) const {
    double total = bias.get(feature);
    *size = std::fabs(total);
    for (int64_t i = 0; i < k; ++i) {
      const double product = x.get(row * k + i) * weight.get(feature * k + i);
      total += product;
      *size += std::fabs(product);
    }
    return total;
  }
};

double activation(int epilogue, double x) {
  if (epilogue == 1) return x / (1 + std::exp(-x));
  return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

void check_exact(const Linear& linear, const Array& x, const Array* residual, const Array& out,
                 int epilogue, int64_t m) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < linear.n; ++j) {
      double size, up_size;
      double exact = linear.sum(x, i, j, &size);
      if (linear.gated) {
        const double up = linear.sum(x, i, linear.n + j, &up_size);
        size = 4 * (1 + std::fabs(up)) * (size + up_size);
        exact = activation(epilogue, exact) * up;
      } else if (residual != nullptr) {
        exact += residual->get(i * linear.n + j);
        size += 1;
      }
      require_close(out, i * linear.n + j, exact, size, linear.k, "linear");
    }
  }
}

void check_call(const Linear& linear, const Problem& p, int out_dtype, int epilogue,
                bool add, Digest& digest) {
  const Array x(linear.dtype, p.m * p.k, 3), stream(out_dtype, p.m * p.n, 4);
  const Array* residual = add ? &stream : nullptr;
  Array out(out_dtype, p.m * p.n), again(out_dtype, p.m * p.n), alone(out_dtype, p.n);
  pagemill::set_num_threads(1);
  linear.run(x, 0, p.m, residual, out, epilogue);
  check_exact(linear, x, residual, out, epilogue, p.m);
  digest.add(out.data(), static_cast<size_t>(out.bytes()));
  pagemill::set_num_threads(2);
  linear.run(x, 0, p.m, residual, again, epilogue);
  require(again.same(out, 0, 0, p.m * p.n), "linear: two threads change bits");
  for (int64_t i = 0; i < p.m; i += 3) {
    linear.run(x, i, 1, residual, alone, epilogue);
    require(alone.same(out, 0, i * p.n, p.n), "linear: a row alone has other bits");
  }
}

void check_rows(const Linear& linear) {
  const std::vector<int64_t> ids{linear.n - 1, 0, linear.n / 2, 0};
  Array out(linear.dtype, static_cast<int64_t>(ids.size()) * linear.k);
  pagemill::linear_rows(reinterpret_cast<uintptr_t>(ids.data()),
                        static_cast<int64_t>(ids.size()), linear.packed.address(), linear.n,
                        linear.k, out.address(), linear.dtype);
  for (size_t i = 0; i < ids.size(); ++i)
    require(out.same(linear.weight, static_cast<int64_t>(i) * linear.k, ids[i] * linear.k,
                     linear.k),
            "linear_rows: a row does not come back");
}

}  // namespace

void check_linear(Digest& digest) {
  for (const int dtype : {0, 1}) {
    for (const Problem& p : kProblems) {
      const Linear plain(dtype, p, false), gated(dtype, p, true);
      check_rows(plain);
      for (const int out_dtype : {0, 1}) {
        for (const bool add : {false, true}) check_call(plain, p, out_dtype, 0, add, digest);
        for (const int epilogue : {1, 2}) check_call(gated, p, out_dtype, epilogue, false, digest);
      }
    }
  }
  require(pagemill::linear_scratch_bytes() > 0, "linear_scratch_bytes is nothing");
}

}  // namespace driver
