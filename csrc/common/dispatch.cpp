#include "common/dispatch.h"

#include <atomic>
#include <cstdint>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pagemill {
namespace {

constexpr const char* kNames[kNumIsas] = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};

#if defined(__x86_64__)

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

bool bit(unsigned word, int index) { return (word >> index) & 1u; }

// Register states that the system saves for a process (XCR0).
uint64_t saved_states() {
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux gives the tile registers to a process that asks, before its threads use them.
bool ask_for_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023;
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Isa detect() {
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
  const Registers one = cpuid(1, 0);
  if (!bit(one.c, 27)) return Isa::portable;  // OSXSAVE: xgetbv may be used
  const uint64_t saved = saved_states();
  const Registers seven = cpuid(7, 0), seven_one = cpuid(7, 1);
  const bool avx2 = bit(one.c, 12) && bit(seven.b, 5) && (saved & kYmm) == kYmm;  // FMA, AVX2
  if (!avx2 || !PAGEMILL_HAVE_AVX2) return Isa::portable;
  const bool avx512 = bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) &&
                      bit(seven.b, 31) && (saved & kZmm) == kZmm;  // F, DQ, BW, VL
  if (!avx512 || !PAGEMILL_HAVE_AVX512) return Isa::avx2;
  if (!bit(seven_one.a, 5) || !PAGEMILL_HAVE_AVX512_BF16) return Isa::avx512;
  const bool amx = bit(seven.d, 24) && bit(seven.d, 22) && (saved & kTiles) == kTiles;
  if (!amx || !PAGEMILL_HAVE_AMX || !ask_for_tiles()) return Isa::avx512_bf16;
  return Isa::amx;
}

#else

Isa detect() { return Isa::portable; }

#endif

// -1: the best one.
std::atomic<int> forced{-1};

}  // namespace

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

Isa best_isa() {
  static const Isa best = detect();
  return best;
}

Isa active_isa() {
  const int chosen = forced.load(std::memory_order_relaxed);
  return chosen < 0 ? best_isa() : static_cast<Isa>(chosen);
}

std::string available_isas() {
  std::string names;
  for (int i = static_cast<int>(best_isa()); i >= 0; --i) {
    names += kNames[i];
    if (i > 0) names += ", ";
  }
  return names;
}

void force_isa(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(best_isa()); ++i) {
    if (name == kNames[i]) {
      forced.store(i, std::memory_order_relaxed);
      return;
    }
  }
  throw std::invalid_argument("no kernels for the instruction set '" + name +
                              "' on this machine; available: " + available_isas());
}

}  // namespace pagemill
