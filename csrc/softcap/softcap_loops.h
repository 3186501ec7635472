// The loop of soft_cap, compiled once an instruction set. Included by softcap_<isa>.cpp only; everything
// is in an unnamed namespace.
#pragma once

#include "common/lane_math.h"
#include "softcap/softcap_kernels.h"

namespace pagemill::softcap_detail {
namespace {

void soft_cap_run(float* x, int64_t count, float cap) {
  for_lanes(count, [&](int64_t, const auto& get, const auto& put) {
    put(x, tanh_lanes(get(x) / cap) * cap);
  });
}

constexpr Kernels kKernels = {soft_cap_run};

}  // namespace
}  // namespace pagemill::softcap_detail
