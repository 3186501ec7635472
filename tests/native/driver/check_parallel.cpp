#include <atomic>
#include <stdexcept>
#include <string>

#include "checks.h"

namespace driver {
namespace {

// What the parts from `from` on throw must reach the caller: the first one's, after all have run.
void check_thrown(int64_t count, int64_t from) {
  std::atomic<int64_t> done{0};
  int64_t caught = -1;
  try {
    pagemill::parallel_for(count, 1, [&](int64_t first, int64_t last) {
      if (first >= from) throw std::out_of_range(std::to_string(first));
      done += last - first;
    });
  } catch (const std::out_of_range& error) {
    caught = std::stoll(error.what());
  }
  require(caught >= from, "parallel_for: an exception was lost");
  require(done == caught, "parallel_for: not the exception of the first part that failed");
}

}  // namespace

void check_parallel(Digest&) {
  for (const int threads : {1, 2, 3}) {
    pagemill::set_num_threads(threads);
    for (const int64_t count : {3, 8, 100}) {
      std::atomic<int64_t> done{0};
      pagemill::parallel_for(count, 1, [&](int64_t first, int64_t last) { done += last - first; });
      require(done == count, "parallel_for: not every unit once");
      check_thrown(count, 0);
      if (threads > 1) check_thrown(count, 1);
    }
  }
}

}  // namespace driver
