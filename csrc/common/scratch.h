// Memory that an operation keeps from call to call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace pagemill {

// A cache-line aligned buffer that grows and is kept.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  void* get(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace pagemill
