#include "rope/rope_loops.h"

namespace pagemill::rope_detail {

const Kernels* avx512_kernels() { return &kKernels; }

}  // namespace pagemill::rope_detail
