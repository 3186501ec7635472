#include "pointwise/pointwise_loops.h"

namespace pagemill::pointwise_detail {

const Kernels* portable_kernels() { return &kKernels; }

}  // namespace pagemill::pointwise_detail
