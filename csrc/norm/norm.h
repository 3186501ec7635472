// Normalization of rows, and their scaling: RMSNorm (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016).
//
// Exactness: sums over a row are 64 running sums, number i belonging to sum i modulo 64, added up in
// one fixed tree; the bits depend on the row alone, and are the same on every instruction set.
#pragma once

#include <cstdint>

namespace pagemill {

// out[rows, size] = x / rms(x) * (offset + weight[size]), all of `dtype`; strides in elements. With offset
// 0 the quotient is rounded before the weight, as the reference does. Where `residual` is given (it may
// be out itself) the rounded result is added to it. out may be x.
void rms_norm(uintptr_t x, int64_t x_stride, int64_t rows, int64_t size, uintptr_t weight, float eps,
              float offset, int dtype, uintptr_t residual, int64_t residual_stride, uintptr_t out,
              int64_t out_stride);

// out[rows, size] = (x - mean) / std * weight + bias, rounded once; weight and bias may be 0.
void layer_norm(uintptr_t x, int64_t x_stride, int64_t rows, int64_t size, uintptr_t weight,
                uintptr_t bias, float eps, int dtype, uintptr_t out, int64_t out_stride);

// Multiply `count` numbers by a factor in place, each product float32 and rounded once.
void scale(uintptr_t x, int64_t count, float factor, int dtype);

}  // namespace pagemill
