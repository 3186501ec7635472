#include "softcap/softcap_loops.h"

namespace pagemill::softcap_detail {

const Kernels* avx2_kernels() { return &kKernels; }

}  // namespace pagemill::softcap_detail
