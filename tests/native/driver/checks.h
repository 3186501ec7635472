// What the checks of the kernels share, where there is no Python: numbers, comparisons, and a digest.
//
// The program runs every operation on made-up inputs, on each path of the machine that it runs on (a real
// or an emulated one), under whatever sanitizer it was built with. An operation is one file check_<op>.cpp
// and one line in main.cpp. A check compares with a plain float64 loop, and rows with themselves in other
// company; what it computed goes into the path's digest: one path gives the same bits on every machine.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "common/parallel.h"
#include "common/vec.h"

namespace driver {

// FNV-1a over everything that a path computed.
class Digest {
 public:
  void add(const void* data, size_t bytes) {
    const unsigned char* p = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) value_ = (value_ ^ p[i]) * 1099511628211ull;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 14695981039346656037ull;
};

// The same numbers on every machine, in (-1, 1).
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : state_(seed * 2 + 1) {}
  float next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<float>(static_cast<int32_t>(state_ >> 40) - (1 << 23)) * 0x1p-23f;
  }

 private:
  uint64_t state_;
};

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

inline void require(bool ok, const std::string& what) {
  if (!ok) fail(what);
}

// float32, bfloat16 or int8 numbers (dtype 0, 1, 2) on 64 bytes, exactly as large as asked for: what lies past the end is
// the sanitizer's.
class Array {
 public:
  Array(int dtype, int64_t count) : dtype_(dtype), count_(count) {
    constexpr int64_t kMost = int64_t{1} << 30;
    if (bytes() < 0 || bytes() > kMost ||
        posix_memalign(&data_, 64, static_cast<size_t>(bytes() > 0 ? bytes() : 1)) != 0)
      fail("no memory for an array");
    std::memset(data_, 0, static_cast<size_t>(bytes()));
  }
  Array(int dtype, int64_t count, uint64_t seed) : Array(dtype, count) {
    Numbers numbers(seed);
    for (int64_t i = 0; i < count; ++i) set(i, numbers.next());
  }
  Array(const Array& other) : Array(other.dtype_, other.count_) {
    std::memcpy(data_, other.data_, static_cast<size_t>(bytes()));
  }
  Array& operator=(const Array&) = delete;
  ~Array() { std::free(data_); }

  int dtype() const { return dtype_; }
  int64_t count() const { return count_; }
  int64_t item() const { return dtype_ == 0 ? 4 : dtype_ == 1 ? 2 : 1; }
  int64_t bytes() const { return count_ * item(); }
  const char* data() const { return static_cast<const char*>(data_); }
  uintptr_t at(int64_t i) const { return reinterpret_cast<uintptr_t>(data_) + static_cast<uintptr_t>(i * item()); }
  uintptr_t address() const { return at(0); }
  double get(int64_t i) const {
    if (dtype_ == 2) return static_cast<const int8_t*>(data_)[i];
    return dtype_ == 0 ? static_cast<const float*>(data_)[i]
                       : pagemill::to_float(static_cast<const pagemill::bf16*>(data_)[i]);
  }
  void set(int64_t i, float x) {
    if (dtype_ == 0)
      static_cast<float*>(data_)[i] = x;
    else if (dtype_ == 2)
      static_cast<int8_t*>(data_)[i] = static_cast<int8_t>(x * 127);
    else
      static_cast<pagemill::bf16*>(data_)[i] = pagemill::to_bf16(x);
  }
  bool same(const Array& other, int64_t from, int64_t other_from, int64_t n) const {
    return std::memcmp(data() + from * item(), other.data() + other_from * item(),
                       static_cast<size_t>(n * item())) == 0;
  }

 private:
  int dtype_;
  int64_t count_;
  void* data_ = nullptr;
};

// Compare with float64. `size` is the sum of the sizes of what was added up, `terms` how many.
inline void require_close(const Array& got, int64_t i, double exact, double size, int64_t terms,
                          const std::string& what) {
  const double error = got.get(i) - exact;
  double bound = 2.0 * static_cast<double>(terms + 8) * 0x1p-24 * size + 1e-30;
  if (got.dtype() == 1) bound += 0x1p-8 * (exact < 0 ? -exact : exact);
  require(error <= bound && -error <= bound,
          what + ": " + std::to_string(got.get(i)) + " instead of " + std::to_string(exact));
}

// The checks, one a folder of csrc/, and of what they share.
void check_attention(Digest& digest);
void check_embedding(Digest& digest);
void check_limits(Digest& digest);
void check_linear(Digest& digest);
void check_linear_int8(Digest& digest);
void check_norm(Digest& digest);
void check_parallel(Digest& digest);
void check_pointwise(Digest& digest);
void check_qlinear(Digest& digest);
void check_rope(Digest& digest);
void check_sampling(Digest& digest);
void check_softcap(Digest& digest);
void check_tape(Digest& digest);

}  // namespace driver
