#include "common/parallel.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <atomic>
#include <mutex>
#include <utility>

#include "common/check.h"

namespace pagemill {
namespace {

std::atomic<int> threads{1};

std::mutex places_lock;
std::vector<std::vector<int>> places;  // by part
std::atomic<int> places_version{0};    // 0: never set

}  // namespace

int num_threads() { return threads.load(std::memory_order_relaxed); }

void set_num_threads(int count) {
  check(count >= 1, "set_num_threads", "count", "must be at least 1");
  threads.store(count, std::memory_order_relaxed);
}

void pin_threads(std::vector<std::vector<int>> wanted) {
  const std::lock_guard<std::mutex> lock(places_lock);
  places = std::move(wanted);
  ++places_version;
}

void enter_part(int64_t part) {
  thread_local int version = 0;
  thread_local int64_t place = -1;
  const int current = places_version.load(std::memory_order_acquire);
  if (version == current && (current == 0 || place == part)) return;
  version = current;
  place = part;
#if defined(__linux__)
  const std::lock_guard<std::mutex> lock(places_lock);
  if (part >= static_cast<int64_t>(places.size())) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : places[static_cast<std::size_t>(part)])
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  // A processor may have been taken away since; the thread then stays where it may run.
  sched_setaffinity(0, sizeof set, &set);
#endif
}

}  // namespace pagemill
