#include "softcap/softcap_loops.h"

namespace pagemill::softcap_detail {

const Kernels* avx512_kernels() { return &kKernels; }

}  // namespace pagemill::softcap_detail
