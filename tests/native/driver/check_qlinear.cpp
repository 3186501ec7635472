#include <algorithm>
#include <cmath>

#include "checks.h"
#include "qlinear/qlinear.h"

namespace driver {
namespace {

using pagemill::Codec;
using pagemill::Offset;

struct Format {
  Codec codec;
  int64_t group;
  Offset offset;
};

constexpr Format kFormats[] = {{Codec::int4, 32, Offset::none}, {Codec::int4, 64, Offset::min},
                               {Codec::int4, 128, Offset::zero}, {Codec::int8, 1 << 20, Offset::none},
                               {Codec::int8, 16, Offset::min},   {Codec::fp8, 128, Offset::none}};

struct Problem {
  int64_t m, n, k;
};

constexpr Problem kProblems[] = {{1, 16, 128}, {7, 33, 100}, {30, 20, 300}};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
uintptr_t address(const std::vector<T>& v) {
  return reinterpret_cast<uintptr_t>(v.data());
}

// A float16 number whose bits are easy to write: (1 + eighths / 8) / 2^shift.
struct Half {
  int shift, eighths;
  uint16_t bits() const { return static_cast<uint16_t>((15 - shift) << 10 | eighths << 7); }
  double value() const { return std::ldexp(1 + eighths / 8.0, -shift); }
};

double fp8_value(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double size = exponent == 0 ? std::ldexp(mantissa / 8.0, -6)
                                    : std::ldexp(1 + mantissa / 8.0, exponent - 7);
  return code & 0x80 ? -size : size;
}

// One part (or a gate and an up part) of random codes, packed, and the same as float64 weights.
struct Matrix {
  Format form;
  int64_t n, k, parts, groups;
  std::vector<int> table;
  Array codes;  // bytes
  std::vector<uint16_t> scales, offsets;
  std::vector<float> multipliers;
  std::vector<double> weights;  // [parts * n, k]

  Matrix(const Format& f, const Problem& p, int64_t count)
      : form(f), n(p.n), k(p.k), parts(count), groups(count_groups(f.group, p.k)),
        codes(2, ceil_div(p.n, 16) * count * ceil_div(p.k, 32) * (f.codec == Codec::int4 ? 256 : 512)),
        scales(static_cast<size_t>(ceil_div(p.n, 16) * count * groups * 16)),
        offsets(scales.size()),
        multipliers(static_cast<size_t>(ceil_div(p.n, 16) * count * 16)) {
    if (form.codec == Codec::int4)
      for (int i = 0; i < 16; ++i) table.push_back(i * 2 - 15);
    for (int64_t part = 0; part < parts; ++part) fill(part);
  }

  pagemill::QMatrix handle() const {
    return pagemill::QMatrix(static_cast<int>(form.codec), form.group, n, k,
                             static_cast<int>(parts), codes.address(), address(scales),
                             form.offset == Offset::none ? 0 : address(offsets),
                             static_cast<int>(form.offset), address(multipliers), table);
  }

 private:
  static int64_t count_groups(int64_t group, int64_t k) {
    return group >= k ? 1 : ceil_div(ceil_div(k, 32) * 32, group);
  }

  double value(uint8_t code) const {
    if (form.codec == Codec::int4) return table[code];
    return form.codec == Codec::int8 ? static_cast<int8_t>(code) : fp8_value(code);
  }

  void fill(int64_t part) {
    Numbers numbers(20 + static_cast<uint64_t>(part));
    std::vector<uint8_t> plain;
    const int bits = form.codec == Codec::int4 ? 4 : 8;
    for (int64_t i = 0; i < n * k; ++i) {
      uint8_t code = static_cast<uint8_t>(std::lrintf((numbers.next() + 1) * 7.5f));
      if (bits == 8) code = static_cast<uint8_t>(std::lrintf((numbers.next() + 1) * 127));
      if (form.codec == Codec::fp8) code &= 0xbf;  // at most 2: no NaN
      plain.push_back(code);
    }
    pagemill::qlinear_pack(address(plain), n, k, k, bits, codes.address(), part, parts);
    for (int64_t row = 0; row < n; ++row) {
      const int64_t tile = row / 16 * parts + part;
      const float multiplier = 1 + static_cast<float>(row % 3);
      multipliers[static_cast<size_t>(tile * 16 + row % 16)] = multiplier;
      for (int64_t i = 0; i < k; ++i) {
        const int64_t group = groups == 1 ? 0 : i / form.group;
        const Half scale{4 + static_cast<int>((row + group) % 4), static_cast<int>(row % 8)};
        const Half offset{static_cast<int>(group % 3), static_cast<int>((row + 1) % 8)};
        const size_t at = static_cast<size_t>((tile * groups + group) * 16 + row % 16);
        scales[at] = scale.bits();
        offsets[at] = offset.bits();
        double w = value(plain[static_cast<size_t>(row * k + i)]);
        if (form.offset == Offset::zero) w -= offset.value();
        w *= scale.value();
        if (form.offset == Offset::min) w += offset.value();
        weights.push_back(w * static_cast<double>(multiplier));
      }
    }
  }
};

void run(const Matrix& matrix, const Array& x, int64_t row, int64_t m, Array& out, int epilogue) {
  pagemill::qlinear(matrix.handle(), x.at(row * matrix.k), matrix.k, m, x.dtype(), 0, 0, matrix.n,
                    out.address(), matrix.n, out.dtype(), epilogue);
}

void check_exact(const Matrix& matrix, const Array& x, const Array& out, int64_t m) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < matrix.n; ++j) {
      double sums[2] = {0, 0}, size = 0;
      for (int64_t part = 0; part < matrix.parts; ++part) {
        for (int64_t d = 0; d < matrix.k; ++d) {
          const double w = matrix.weights[static_cast<size_t>((part * matrix.n + j) * matrix.k + d)];
          sums[part] += x.get(i * matrix.k + d) * w;
          size += std::fabs(x.get(i * matrix.k + d)) * (std::fabs(w) + 1);
        }
      }
      double want = sums[0];
      if (matrix.parts == 2) want = sums[0] / (1 + std::exp(-sums[0])) * sums[1];
      // What is added to zeros and mins may be far larger than the result.
      const double reach = size * 4 * (matrix.parts == 2 ? 2 + std::fabs(sums[1]) : 1);
      require_close(out, i * matrix.n + j, want, reach, matrix.k, "qlinear");
    }
  }
}

void check_call(const Matrix& matrix, int64_t m, int dtype, Digest& digest) {
  const int epilogue = matrix.parts == 2 ? 1 : 0;
  const Array x(dtype, m * matrix.k, 9);
  Array out(dtype, m * matrix.n), again(dtype, m * matrix.n), alone(dtype, matrix.n);
  pagemill::set_num_threads(1);
  run(matrix, x, 0, m, out, epilogue);
  check_exact(matrix, x, out, m);
  digest.add(out.data(), static_cast<size_t>(out.bytes()));
  pagemill::set_num_threads(2);
  run(matrix, x, 0, m, again, epilogue);
  require(again.same(out, 0, 0, out.count()), "qlinear: two threads change bits");
  for (int64_t i = 0; i < m; i += 3) {
    run(matrix, x, i, 1, alone, epilogue);
    require(alone.same(out, 0, i * matrix.n, matrix.n), "qlinear: a row alone has other bits");
  }
}

void check_rows(const Matrix& matrix) {
  const std::vector<int64_t> ids{matrix.n - 1, 0};
  Array rows(0, 2 * matrix.k);
  pagemill::qlinear_rows(matrix.handle(), address(ids), 2, rows.address(), 0);
  for (int64_t i = 0; i < 2 * matrix.k; ++i) {
    const double want =
        matrix.weights[static_cast<size_t>(ids[static_cast<size_t>(i / matrix.k)] * matrix.k + i % matrix.k)];
    require(std::fabs(rows.get(i) - want) <= 1e-5 * (1 + std::fabs(want)),
            "qlinear_rows: a row does not come back");
  }
}

void check_quantize(Digest& digest) {
  constexpr int64_t kRows = 5, kColumns = 70;
  const Array weight(0, kRows * kColumns, 11);
  std::vector<int> table;
  for (int i = -8; i < 8; ++i) table.push_back(i);
  std::vector<uint8_t> codes(kRows * kColumns);
  std::vector<float> scales(kRows * 3);
  pagemill::qlinear_quantize(weight.address(), kRows, kColumns, kColumns, 0, table, address(codes),
                             address(scales));
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    require(codes[static_cast<size_t>(i)] < 16, "qlinear_quantize: no code of four bits");
    const double scale = scales[static_cast<size_t>(i / kColumns * 3 + i % kColumns / 32)];
    const double back = scale * table[codes[static_cast<size_t>(i)]];
    require(std::fabs(back - weight.get(i)) <= 0.2, "qlinear_quantize: far from the weight");
  }
  digest.add(codes.data(), codes.size());
}

}  // namespace

void check_qlinear(Digest& digest) {
  for (const Format& form : kFormats) {
    for (const Problem& p : kProblems) {
      const Matrix plain(form, p, 1), gated(form, p, 2);
      check_rows(plain);
      for (const int dtype : {0, 1}) {
        check_call(plain, p.m, dtype, digest);
        check_call(gated, p.m, dtype, digest);
      }
    }
  }
  check_quantize(digest);
  require(pagemill::qlinear_scratch_bytes() > 0, "qlinear_scratch_bytes is nothing");
}

}  // namespace driver
