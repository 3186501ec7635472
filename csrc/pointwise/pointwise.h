// Operations of a layer on number after number: activations, sums of two tensors, columns in another order.
#pragma once

#include <cstdint>

namespace pagemill {

// What `activate` may do; the names are those of ops/cpu_layers.py.
enum class Activation { gelu = 0, gelu_tanh, silu, quick_gelu, relu, relu_squared };

// Make each of `count` numbers x its activation, in place, in float32 and rounded once. Each depends on
// itself alone; the bits are the same on every instruction set. dtype: 0 float32, 1 bfloat16.
void activate(uintptr_t x, int64_t count, int activation, int dtype);

// Add `count` numbers y to x in place, in float32 and rounded once.
void add(uintptr_t x, uintptr_t y, int64_t count, int dtype);

// Add row ids[i] + offset of table [n, size] to row i of x [count, size], both contiguous, likewise.
void add_rows(uintptr_t x, int64_t count, int64_t size, uintptr_t ids, int64_t offset,
              uintptr_t table, int64_t n, int dtype);

// Copy columns order[0..columns) of x [rows, k] (rows `x_stride` numbers apart) to out [rows, columns].
void gather_columns(uintptr_t x, int64_t x_stride, int64_t rows, int64_t k, uintptr_t order,
                    int64_t columns, uintptr_t out, int dtype);

}  // namespace pagemill
