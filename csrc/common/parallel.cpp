#include "common/parallel.h"

#include <atomic>

#include "common/check.h"

namespace pagemill {
namespace {

std::atomic<int> threads{1};

}  // namespace

int num_threads() { return threads.load(std::memory_order_relaxed); }

void set_num_threads(int count) {
  check(count >= 1, "set_num_threads", "count", "must be at least 1");
  threads.store(count, std::memory_order_relaxed);
}

}  // namespace pagemill
