#include "norm/norm_loops.h"

namespace pagemill::norm_detail {

const Kernels* avx2_kernels() { return &kKernels; }

}  // namespace pagemill::norm_detail
