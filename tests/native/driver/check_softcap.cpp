#include <cmath>

#include "checks.h"
#include "softcap/softcap.h"

namespace driver {

void check_softcap(Digest& digest) {
  for (const int64_t count : {1, 16, 1000, 70001}) {
    Array x(0, count, 1), again(0, count, 1), alone(0, 1);
    pagemill::set_num_threads(1);
    const float first = static_cast<float>(x.get(0));
    pagemill::soft_cap(x.address(), count, 0.5f);
    pagemill::set_num_threads(2);
    const Array before(again);
    pagemill::soft_cap(again.address(), count, 0.5f);
    require(again.same(x, 0, 0, count), "soft_cap: two threads change bits");
    for (int64_t i = 0; i < count; ++i)
      require(std::fabs(x.get(i) - 0.5 * std::tanh(before.get(i) / 0.5)) < 1e-6,
              "soft_cap: a wrong number");
    alone.set(0, first);
    pagemill::soft_cap(alone.address(), 1, 0.5f);
    require(alone.same(x, 0, 0, 1), "soft_cap: a number alone has other bits");
    digest.add(x.data(), static_cast<size_t>(x.bytes()));
  }
}

}  // namespace driver
