#include "softcap/softcap.h"

#include "common/check.h"
#include "common/dispatch.h"
#include "common/parallel.h"
#include "softcap/softcap_kernels.h"

namespace pagemill {
namespace {

using namespace softcap_detail;

using KernelsFn = const Kernels* (*)();
constexpr Table<KernelsFn> kTable = {{portable_kernels, PAGEMILL_IF_AVX2(avx2_kernels),
                                      PAGEMILL_IF_AVX512(avx512_kernels), nullptr, nullptr}};

// A thread takes at least so many numbers.
constexpr int64_t kGrain = 1 << 14;

}  // namespace

void soft_cap(uintptr_t x, int64_t count, float cap) {
  check(count >= 0, "soft_cap", "count", "must be at least 0");
  check(cap > 0, "soft_cap", "cap", "must be positive");
  check(count == 0 || x != 0, "soft_cap", "x", "must not be null");
  float* numbers = reinterpret_cast<float*>(x);
  const auto run = pick(kTable)()->soft_cap;
  parallel_for(count, kGrain, [&](int64_t first, int64_t last) {
    run(numbers + first, last - first, cap);
  });
}

}  // namespace pagemill
