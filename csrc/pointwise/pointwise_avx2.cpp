#include "pointwise/pointwise_loops.h"

namespace pagemill::pointwise_detail {

const Kernels* avx2_kernels() { return &kKernels; }

}  // namespace pagemill::pointwise_detail
