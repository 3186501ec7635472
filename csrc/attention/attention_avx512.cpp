#include "attention/attention_zmm.h"

namespace pagemill {
namespace attention_detail {

const Kernels* avx512_f32() { return kernels<Zmm, Floats>(); }
const Kernels* avx512_bf16() { return kernels<Zmm, WidePairs>(); }

}  // namespace attention_detail
}  // namespace pagemill
