#include "sampling/sampling_loops.h"

namespace pagemill::sampling_detail {

const Kernels* portable_kernels() { return &kKernels; }

}  // namespace pagemill::sampling_detail
