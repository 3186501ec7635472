#include <cmath>

#include "checks.h"
#include "rope/rope.h"

namespace driver {
namespace {

struct Heads {
  int64_t tokens, heads, head_dim, half;
  bool norm, interleaved;
};

constexpr Heads kHeads[] = {{7, 3, 16, 8, true, false},
                            {5, 2, 20, 6, false, true},
                            {6, 1, 7, 2, true, true},
                            {1, 4, 64, 0, true, false}};
constexpr float kEps = 1e-5f, kOffset = 1.0f;

struct Inputs {
  Array x, weight, cos, sin;
  Inputs(const Heads& h, int dtype)
      : x(dtype, h.tokens * h.heads * h.head_dim, 1), weight(dtype, h.heads * h.head_dim, 2),
        cos(dtype, h.tokens * h.half), sin(dtype, h.tokens * h.half) {
    Numbers angles(3);
    for (int64_t i = 0; i < h.tokens * h.half; ++i) {
      const float angle = 3 * angles.next();
      cos.set(i, std::cos(angle));
      sin.set(i, std::sin(angle));
    }
  }
};

Array run(const Heads& h, const Inputs& in, int64_t token, int64_t tokens) {
  const int64_t row = h.heads * h.head_dim;
  Array out(in.x.dtype(), tokens * row);
  std::memcpy(reinterpret_cast<void*>(out.address()), in.x.data() + token * row * in.x.item(),
              static_cast<size_t>(tokens * row * in.x.item()));
  pagemill::rotate_heads(out.address(), row, tokens, h.heads, h.head_dim,
                         h.norm ? in.weight.address() : 0, kEps, kOffset,
                         h.half > 0 ? in.cos.at(token * h.half) : 0,
                         h.half > 0 ? in.sin.at(token * h.half) : 0, h.half, h.interleaved,
                         in.x.dtype());
  return out;
}

std::vector<double> exact(const Heads& h, const Inputs& in, int64_t token, int64_t head) {
  const int64_t start = (token * h.heads + head) * h.head_dim;
  std::vector<double> values;
  double squares = 0;
  for (int64_t i = 0; i < h.head_dim; ++i) {
    values.push_back(in.x.get(start + i));
    squares += values.back() * values.back();
  }
  const double scale = 1 / std::sqrt(squares / static_cast<double>(h.head_dim) + kEps);
  for (int64_t i = 0; h.norm && i < h.head_dim; ++i)
    values[static_cast<size_t>(i)] *=
        scale * (static_cast<double>(kOffset) + in.weight.get(head * h.head_dim + i));
  for (int64_t i = 0; i < h.half; ++i) {
    double& a = values[static_cast<size_t>(h.interleaved ? 2 * i : i)];
    double& b = values[static_cast<size_t>(h.interleaved ? 2 * i + 1 : i + h.half)];
    const double c = in.cos.get(token * h.half + i), s = in.sin.get(token * h.half + i);
    const double turned = a * c - b * s;
    b = b * c + a * s;
    a = turned;
  }
  return values;
}

void check_angles(int dtype) {
  constexpr int64_t kCount = 5, kHalf = 9;
  const std::vector<int64_t> positions{0, 1, 7, 500, 131071};
  Array frequencies(0, kHalf), cos(dtype, kCount * kHalf), sin(dtype, kCount * kHalf);
  for (int64_t i = 0; i < kHalf; ++i) frequencies.set(i, std::pow(10.0f, -static_cast<float>(i)));
  pagemill::set_num_threads(2);
  pagemill::rope_angles(reinterpret_cast<uintptr_t>(positions.data()), kCount,
                        frequencies.address(), kHalf, 1.5f, cos.address(), sin.address(), dtype);
  for (int64_t i = 0; i < kCount * kHalf; ++i) {
    const float angle = static_cast<float>(positions[static_cast<size_t>(i / kHalf)]) *
                        static_cast<float>(frequencies.get(i % kHalf));
    const double bound = dtype == 0 ? 1e-6 : 0x1p-8 * 1.5;
    require(std::fabs(cos.get(i) - 1.5 * std::cos(static_cast<double>(angle))) <= bound &&
                std::fabs(sin.get(i) - 1.5 * std::sin(static_cast<double>(angle))) <= bound,
            "rope_angles: a wrong angle");
  }
}

}  // namespace

void check_rope(Digest& digest) {
  // Not in the digest: sines are the C library's.
  for (const int dtype : {0, 1}) check_angles(dtype);
  for (const Heads& h : kHeads) {
    for (const int dtype : {0, 1}) {
      const Inputs in(h, dtype);
      pagemill::set_num_threads(1);
      const Array out = run(h, in, 0, h.tokens);
      const double bound = dtype == 0 ? 1e-5 : 6 * 0x1p-8;
      for (int64_t token = 0; token < h.tokens; ++token) {
        for (int64_t head = 0; head < h.heads; ++head) {
          const std::vector<double> want = exact(h, in, token, head);
          for (int64_t i = 0; i < h.head_dim; ++i) {
            const double got = out.get((token * h.heads + head) * h.head_dim + i);
            require(std::fabs(got - want[static_cast<size_t>(i)]) <=
                        bound * (1 + std::fabs(want[static_cast<size_t>(i)])),
                    "rotate_heads: a wrong element");
          }
        }
      }
      digest.add(out.data(), static_cast<size_t>(out.bytes()));
      pagemill::set_num_threads(2);
      require(run(h, in, 0, h.tokens).same(out, 0, 0, out.count()),
              "rotate_heads: two threads change bits");
      const int64_t row = h.heads * h.head_dim;
      for (int64_t token = 0; token < h.tokens; ++token)
        require(run(h, in, token, 1).same(out, 0, token * row, row),
                "rotate_heads: a token alone has other bits");
    }
  }
}

}  // namespace driver
