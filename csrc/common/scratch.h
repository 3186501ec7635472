// Memory that an operation keeps from call to call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace pagemill {

// A buffer that grows and is kept, on cache lines. A larger one is in pages of 2 MiB, where Linux has them:
// small pages lie anywhere in memory, and now and then too many of them in the same sets of the second
// cache, which slows all calls of a process.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  // What is taken from the system for so many bytes.
  static int64_t taken(int64_t bytes) {
    const int64_t unit = unit_of(bytes);
    return (bytes + unit - 1) / unit * unit;
  }

  void* get(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      const int64_t unit = unit_of(bytes), size = taken(bytes);
      data_ = std::aligned_alloc(static_cast<size_t>(unit), static_cast<size_t>(size));
      if (data_ == nullptr) throw std::bad_alloc();
#if defined(__linux__)
      // Refused, harmlessly, by a kernel without such pages.
      if (unit == kHugePage) madvise(data_, static_cast<size_t>(size), MADV_HUGEPAGE);
#endif
      size_ = size;
    }
    return data_;
  }

 private:
  static int64_t unit_of(int64_t bytes) { return bytes < kLarge ? kLine : kHugePage; }

  static constexpr int64_t kLine = 64, kLarge = int64_t{1} << 17, kHugePage = int64_t{1} << 21;
  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace pagemill
