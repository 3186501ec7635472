// Soft caps of logits (Gemma 2).
#pragma once

#include <cstdint>

namespace pagemill {

// Make each of `count` float32 numbers x the number cap * tanh(x / cap), in place. Each depends on
// itself alone; the bits are the same on every instruction set.
void soft_cap(uintptr_t x, int64_t count, float cap);

}  // namespace pagemill
