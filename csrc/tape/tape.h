// Recorded steps: the native calls of a model's forward pass, made again without Python.
//
// While a thread records, every operation that is bound through `recorded` notes its function and its
// arguments, addresses included. A replay makes the same calls in the same order; only attention gets
// the plan and the scratch memory of the new step. Whoever records keeps the memory behind the addresses.
#pragma once

#include <cstdint>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/attention.h"

namespace pagemill {

// What differs from step to step.
struct ReplayedStep {
  const std::vector<AttentionPlan*>& plans;  // by kind of layers
  uintptr_t scratch;
  int64_t scratch_bytes;
};

class Tape {
 public:
  // Returns 0, or the bytes of scratch memory that attention is short of.
  using Call = std::function<int64_t(const ReplayedStep&)>;

  // The recorded pass reads `count` token ids and as many positions, int64, from these addresses.
  Tape(uintptr_t token_ids, uintptr_t positions, int64_t count)
      : token_ids_(token_ids), positions_(positions), count_(count) {}
  ~Tape() { stop(); }
  // Note the calls that this thread makes from now on, until `stop`.
  void start();
  void stop();
  void add(Call call) { calls_.push_back(std::move(call)); }
  int64_t size() const { return static_cast<int64_t>(calls_.size()); }
  // Make all calls again for other token ids and positions. Returns 0, or, having made some of them, the
  // bytes of scratch memory that it takes: the caller starts over with as many.
  int64_t replay(uintptr_t token_ids, uintptr_t positions,
                 const std::vector<AttentionPlan*>& plans, uintptr_t scratch,
                 int64_t scratch_bytes) const;

  // The tape that this thread's calls go to, or null.
  static Tape* current();

 private:
  uintptr_t token_ids_, positions_;
  int64_t count_;
  std::vector<Call> calls_;
};

// Processor seconds of calling threads inside bound operations since the last call; they are counted
// once it was called with true.
double kernel_seconds(bool count);

// Adds its own life to kernel_seconds.
class KernelTimer {
 public:
  KernelTimer();
  ~KernelTimer();
  KernelTimer(const KernelTimer&) = delete;
  KernelTimer& operator=(const KernelTimer&) = delete;

 private:
  int64_t start_ns_;
};

// `fn`, noting its calls on the current tape.
template <class... Args>
auto recorded(void (*fn)(Args...)) {
  return [fn](Args... args) {
    if (Tape* tape = Tape::current())
      tape->add([=](const ReplayedStep&) {
        fn(args...);
        return int64_t{0};
      });
    const KernelTimer timer;
    fn(args...);
  };
}

// The same for attention, whose last two arguments are the scratch memory and its size. A call that did
// nothing, for want of scratch memory, is not noted.
template <class... Args>
auto recorded_attention(int64_t (*fn)(AttentionPlan&, Args...)) {
  return [fn](AttentionPlan& plan, Args... args) -> int64_t {
    const KernelTimer timer;
    const int64_t needed = fn(plan, args...);
    Tape* tape = needed == 0 ? Tape::current() : nullptr;
    if (tape == nullptr) return needed;
    const std::size_t kind = static_cast<std::size_t>(plan.kind);
    tape->add([=](const ReplayedStep& step) {
      auto all = std::make_tuple(args...);
      constexpr std::size_t kCount = sizeof...(Args);
      std::get<kCount - 2>(all) = step.scratch;
      std::get<kCount - 1>(all) = step.scratch_bytes;
      return std::apply([&](auto... each) { return fn(*step.plans.at(kind), each...); }, all);
    });
    return needed;
  };
}

}  // namespace pagemill
