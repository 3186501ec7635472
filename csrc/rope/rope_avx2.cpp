#include "rope/rope_loops.h"

namespace pagemill::rope_detail {

const Kernels* avx2_kernels() { return &kKernels; }

}  // namespace pagemill::rope_detail
