#include <cmath>

#include "checks.h"
#include "norm/norm.h"

namespace driver {
namespace {

constexpr float kEps = 1e-5f;

struct Norm {
  bool layer;  // else RMSNorm
  float offset;
  bool residual;
};

void run(const Norm& norm, const Array& x, int64_t row, int64_t rows, int64_t size,
         const Array& weight, const Array& bias, const Array& stream, Array& out) {
  if (norm.layer) {
    pagemill::layer_norm(x.at(row * size), size, rows, size, weight.address(), bias.address(), kEps,
                         x.dtype(), out.address(), size);
    return;
  }
  if (norm.residual)
    std::memcpy(reinterpret_cast<void*>(out.address()), stream.data() + row * size * out.item(),
                static_cast<size_t>(rows * size * out.item()));
  pagemill::rms_norm(x.at(row * size), size, rows, size, weight.address(), kEps, norm.offset,
                     x.dtype(), norm.residual ? out.address() : 0, size, out.address(), size);
}

double exact(const Norm& norm, const Array& x, int64_t row, int64_t size, const Array& weight,
             const Array& bias, const Array& stream, int64_t i) {
  double mean = 0, squares = 0;
  for (int64_t j = 0; norm.layer && j < size; ++j) mean += x.get(row * size + j);
  mean /= static_cast<double>(size);
  for (int64_t j = 0; j < size; ++j) {
    const double part = x.get(row * size + j) - mean;
    squares += part * part;
  }
  const double scale = 1 / std::sqrt(squares / static_cast<double>(size) + kEps);
  const double normed = (x.get(row * size + i) - mean) * scale;
  if (norm.layer) return normed * weight.get(i) + bias.get(i);
  const double result = normed * (static_cast<double>(norm.offset) + weight.get(i));
  return norm.residual ? stream.get(row * size + i) + result : result;
}

void check_one(const Norm& norm, int64_t rows, int64_t size, int dtype, Digest& digest) {
  const Array x(dtype, rows * size, 1), weight(dtype, size, 2), bias(dtype, size, 3),
      stream(dtype, rows * size, 4);
  Array out(dtype, rows * size), again(dtype, rows * size), alone(dtype, size);
  pagemill::set_num_threads(1);
  run(norm, x, 0, rows, size, weight, bias, stream, out);
  // bfloat16 is rounded up to three times on the way.
  const double bound = dtype == 0 ? 1e-5 : 3 * 0x1p-8;
  for (int64_t i = 0; i < rows * size; ++i) {
    const double want = exact(norm, x, i / size, size, weight, bias, stream, i % size);
    require(std::fabs(out.get(i) - want) <= bound * (1 + 2 * std::fabs(want)),
            "norm: " + std::to_string(out.get(i)) + " instead of " + std::to_string(want));
  }
  digest.add(out.data(), static_cast<size_t>(out.bytes()));
  pagemill::set_num_threads(2);
  run(norm, x, 0, rows, size, weight, bias, stream, again);
  require(again.same(out, 0, 0, rows * size), "norm: two threads change bits");
  for (int64_t row = 0; row < rows; row += 2) {
    run(norm, x, row, 1, size, weight, bias, stream, alone);
    require(alone.same(out, 0, row * size, size), "norm: a row alone has other bits");
  }
}

void check_scale(int dtype, Digest& digest) {
  const Array x(dtype, 999, 5);
  Array out(x);
  pagemill::set_num_threads(2);
  pagemill::scale(out.address(), 999, 0.75f, dtype);
  for (int64_t i = 0; i < 999; ++i)
    require_close(out, i, 0.75 * x.get(i), std::fabs(x.get(i)), 1, "scale");
  digest.add(out.data(), static_cast<size_t>(out.bytes()));
}

}  // namespace

void check_norm(Digest& digest) {
  const Norm norms[] = {{false, 0.0f, false}, {false, 1.0f, true}, {false, 0.0f, true},
                        {true, 0.0f, false}};
  for (const Norm& norm : norms)
    for (const int64_t size : {1, 63, 64, 200})
      for (const int dtype : {0, 1}) check_one(norm, 9, size, dtype, digest);
  for (const int dtype : {0, 1}) check_scale(dtype, digest);
}

}  // namespace driver
