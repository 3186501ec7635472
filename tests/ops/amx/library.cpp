// The linear layers with their AMX paths alone, for machines that have none: a shared library for ctypes.
//
// Built twice. With PAGEMILL_EMULATED_TILES tiles are plain C++. Without, linear_amx.cpp is compiled as
// it is for a machine with AMX, and traps.cpp carries out its tile instructions. What AMX paths take from
// the paths before them is the portable one's.
#include <cstdint>
#include <cstdio>
#include <exception>

#include "common/dispatch.h"
#include "common/parallel.h"
#include "limits/limits.h"
#include "limits/limits_kernels.h"
#include "linear/linear.h"
#include "linear/linear_kernels.h"
#include "linear_int8/linear_int8.h"
#include "linear_int8/linear_int8_kernels.h"

namespace pagemill {

Isa active_isa() { return Isa::amx; }

namespace linear_detail {

const Kernels* avx512_bf16_kernels(Dtype dtype) { return portable_kernels(dtype); }

}  // namespace linear_detail

namespace limits_detail {

const Kernels* avx512_bf16_kernels() { return portable_kernels(); }

}  // namespace limits_detail

namespace linear_int8_detail {

const Kernels* avx512_vnni_kernels() { return portable_kernels(); }

}  // namespace linear_int8_detail
}  // namespace pagemill

namespace {

thread_local char message[256];

// Call `body`; returns null, or what it threw.
template <class Body>
const char* guarded(const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    std::snprintf(message, sizeof message, "%s", error.what());
    return message;
  }
}

}  // namespace

extern "C" {

void amx_set_num_threads(int count) { pagemill::set_num_threads(count); }

double amx_peak_flops(int64_t rounds) { return pagemill::peak_flops(1, rounds); }
double amx_peak_int8_ops(int64_t rounds) { return pagemill::peak_int8_ops(rounds); }

uint64_t amx_read_memory(uintptr_t from, int64_t bytes) { return pagemill::read_memory(from, bytes); }

uint64_t amx_read_pieces(uintptr_t from, int64_t piece_bytes, uintptr_t order, int64_t count) {
  return pagemill::read_pieces(from, piece_bytes, order, count);
}

const char* amx_pack_linear(uintptr_t weight, int64_t rows, int64_t k, int64_t stride,
                            uintptr_t packed, int64_t tile_first, int64_t tile_step, int dtype) {
  return guarded([&] {
    pagemill::pack_linear(weight, rows, k, stride, packed, tile_first, tile_step, dtype);
  });
}

const char* amx_linear_rows(uintptr_t ids, int64_t count, uintptr_t packed, int64_t n, int64_t k,
                            uintptr_t out, int dtype) {
  return guarded([&] { pagemill::linear_rows(ids, count, packed, n, k, out, dtype); });
}

const char* amx_linear(uintptr_t x, int64_t x_stride, int64_t m, uintptr_t packed, int64_t n,
                       int64_t k, int dtype, uintptr_t bias, uintptr_t residual,
                       int64_t residual_stride, uintptr_t out, int64_t out_stride, int out_dtype,
                       int epilogue) {
  return guarded([&] {
    pagemill::linear(x, x_stride, m, packed, n, k, dtype, bias, residual, residual_stride, out,
                     out_stride, out_dtype, epilogue);
  });
}

const char* amx_pack_int8(uintptr_t codes, int64_t rows, int64_t k, int64_t stride,
                          uintptr_t scales, uintptr_t packed, uintptr_t packed_scales,
                          uintptr_t sums, int64_t tile_first, int64_t tile_step) {
  return guarded([&] {
    pagemill::pack_int8(codes, rows, k, stride, scales, packed, packed_scales, sums, tile_first,
                        tile_step);
  });
}

const char* amx_linear_int8_rows(uintptr_t ids, int64_t count, uintptr_t packed, uintptr_t scales,
                                 int64_t n, int64_t k, uintptr_t out, int dtype) {
  return guarded(
      [&] { pagemill::linear_int8_rows(ids, count, packed, scales, n, k, out, dtype); });
}

const char* amx_linear_int8(uintptr_t x, int64_t x_stride, int64_t m, int dtype, int rounding,
                            float scale, int zero, uintptr_t packed, uintptr_t scales,
                            uintptr_t sums, int64_t n, int64_t k, uintptr_t bias,
                            uintptr_t residual, int64_t residual_stride, uintptr_t out,
                            int64_t out_stride, int out_dtype, int epilogue) {
  return guarded([&] {
    pagemill::linear_int8(x, x_stride, m, dtype, rounding, scale, zero, packed, scales, sums, n, k,
                          bias, residual, residual_stride, out, out_stride, out_dtype, epilogue);
  });
}
}
