#include "tape/tape.h"

#include <time.h>

#include <atomic>
#include <cstring>

namespace pagemill {
namespace {

thread_local Tape* recording = nullptr;
std::atomic<bool> counting{false};
std::atomic<int64_t> spent_ns{0};

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

}  // namespace

Tape* Tape::current() { return recording; }

void Tape::start() {
  calls_.clear();
  recording = this;
}

void Tape::stop() {
  if (recording == this) recording = nullptr;
}

int64_t Tape::replay(uintptr_t token_ids, uintptr_t positions,
                     const std::vector<AttentionPlan*>& plans, uintptr_t scratch,
                     int64_t scratch_bytes) const {
  const KernelTimer timer;
  const size_t bytes = static_cast<size_t>(count_) * sizeof(int64_t);
  if (bytes > 0) {
    std::memcpy(reinterpret_cast<void*>(token_ids_), reinterpret_cast<void*>(token_ids), bytes);
    std::memcpy(reinterpret_cast<void*>(positions_), reinterpret_cast<void*>(positions), bytes);
  }
  const ReplayedStep step{plans, scratch, scratch_bytes};
  for (const Call& call : calls_) {
    const int64_t needed = call(step);
    if (needed != 0) return needed;
  }
  return 0;
}

double kernel_seconds(bool count) {
  counting.store(count, std::memory_order_relaxed);
  return static_cast<double>(spent_ns.exchange(0)) * 1e-9;
}

KernelTimer::KernelTimer() : start_ns_(counting.load(std::memory_order_relaxed) ? now_ns() : 0) {}

KernelTimer::~KernelTimer() {
  if (start_ns_ != 0) spent_ns += now_ns() - start_ns_;
}

}  // namespace pagemill
