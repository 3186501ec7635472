#include "limits/limits.h"

#include <atomic>

#include "common/dispatch.h"
#include "common/parallel.h"
#include "common/sizes.h"
#include "limits/limits_kernels.h"

namespace pagemill {
namespace {

using namespace limits_detail;
using KernelsFn = const Kernels* (*)();
constexpr Table<KernelsFn> kTable = {{portable_kernels, PAGEMILL_IF_AVX2(avx2_kernels),
                                      PAGEMILL_IF_AVX512(avx512_kernels),
                                      PAGEMILL_IF_AVX512_BF16(avx512_bf16_kernels),
                                      PAGEMILL_IF_AMX(amx_kernels)}};

}  // namespace

double peak_flops(int dtype, int64_t rounds) {
  check_dtype(dtype, "peak_flops");
  check(rounds >= 0, "peak_flops", "rounds", "must not be negative");
  const Kernels* kernels = pick(kTable)();
  const int64_t threads = num_threads();
  double one = 0.0;
  parallel_for(threads, 1, [&](int64_t first, int64_t) {
    const double done = kernels->flops[dtype](rounds);
    if (first == 0) one = done;
  });
  return one * static_cast<double>(threads);
}

uint64_t read_memory(uintptr_t from, int64_t bytes) {
  check(from != 0 && bytes >= 0, "read_memory", "from", "must be memory");
  const Kernels* kernels = pick(kTable)();
  std::atomic<uint64_t> total{0};
  parallel_for(bytes, 4096, [&](int64_t first, int64_t last) {
    total += kernels->read(reinterpret_cast<const char*>(from) + first, last - first);
  });
  return total;
}

uint64_t read_pieces(uintptr_t from, int64_t piece_bytes, uintptr_t order, int64_t count) {
  check(from != 0, "read_pieces", "from", "must be memory");
  check(piece_bytes > 0 && piece_bytes % 64 == 0, "read_pieces", "piece_bytes",
        "must be a multiple of 64");
  check(count >= 0 && (order != 0 || count == 0), "read_pieces", "order", "must be numbers");
  const Kernels* kernels = pick(kTable)();
  std::atomic<uint64_t> total{0};
  parallel_for(count, 1, [&](int64_t first, int64_t last) {
    total += kernels->read_pieces(reinterpret_cast<const char*>(from), piece_bytes,
                                  reinterpret_cast<const int64_t*>(order), first, last);
  });
  return total;
}

}  // namespace pagemill
