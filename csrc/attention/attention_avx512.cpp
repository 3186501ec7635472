#include "attention/attention_zmm.h"

namespace pagemill {
namespace attention_detail {

const Kernels* avx512_f32() { return kernels<Zmm, Floats>(); }
const Kernels* avx512_bf16() { return kernels<Zmm, WidePairs>(); }
const Kernels* avx512_int8() { return coded_kernels<Zmm, Floats, Quads>(); }

}  // namespace attention_detail
}  // namespace pagemill
