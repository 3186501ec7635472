#include "checks.h"
#include "softcap/softcap.h"
#include "tape/tape.h"

namespace driver {

void check_tape(Digest& digest) {
  pagemill::set_num_threads(2);
  const auto cap = pagemill::recorded(&pagemill::soft_cap);
  Array plain(0, 1000, 1), replayed(0, 1000, 1);
  pagemill::kernel_seconds(true);
  // Token ids and positions of the recorded pass, and of the step that is replayed.
  int64_t recorded_at[4] = {1, 2, 3, 4}, given[4] = {5, 6, 7, 8};
  const auto address = [](int64_t* numbers) { return reinterpret_cast<uintptr_t>(numbers); };
  pagemill::Tape tape(address(recorded_at), address(recorded_at + 2), 2);
  tape.start();
  cap(replayed.address(), 1000, 0.5f);
  cap(replayed.address(), 500, 0.25f);
  tape.stop();
  cap(plain.address(), 1000, 0.5f);
  cap(plain.address(), 500, 0.25f);
  require(tape.size() == 2, "tape: calls after its end are noted");
  const std::vector<int64_t> starts{0}, none;
  pagemill::AttentionPlan plan(starts, none, 0, 0, 0, 16);
  std::memcpy(reinterpret_cast<void*>(replayed.address()), Array(0, 1000, 1).data(), 4000);
  require(tape.replay(address(given), address(given + 2), {&plan}, 0, 0) == 0 &&
              replayed.same(plain, 0, 0, 1000),
          "tape: a replay does something else");
  require(std::memcmp(recorded_at, given, sizeof given) == 0, "tape: inputs are not copied");
  require(pagemill::kernel_seconds(false) > 0, "kernel_seconds: nothing is counted");
  digest.add(replayed.data(), static_cast<size_t>(replayed.bytes()));
}

}  // namespace driver
