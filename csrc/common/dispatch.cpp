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

constexpr const char* kNames[kNumIsas] = {"portable", "avx2",      "avx512",     "avx512_bf16",
                                          "amx",      "avx2_vnni", "avx512_vnni"};
constexpr Isa kBestFirst[kNumIsas] = {Isa::amx,       Isa::avx512_bf16, Isa::avx512_vnni, Isa::avx512,
                                      Isa::avx2_vnni, Isa::avx2,        Isa::portable};

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

// What the processor has and the system saves, path by path; each needs the one before it, too.
struct Features {
  bool has[kNumIsas] = {};
  void set(Isa isa, bool present) {
    has[static_cast<int>(isa)] = present && has[static_cast<int>(isa_before(isa))];
  }
};

Features detect() {
  Features found;
  found.has[static_cast<int>(Isa::portable)] = true;
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
  const Registers one = cpuid(1, 0);
  if (!bit(one.c, 27)) return found;  // OSXSAVE: xgetbv may be used
  const uint64_t saved = saved_states();
  const Registers seven = cpuid(7, 0), seven_one = cpuid(7, 1);
  const bool avx2 = bit(one.c, 12) && bit(seven.b, 5) && (saved & kYmm) == kYmm;  // FMA, AVX2
  const bool avx512 = bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) &&
                      bit(seven.b, 31) && (saved & kZmm) == kZmm;  // F, DQ, BW, VL
  const bool amx = bit(seven.d, 22) && bit(seven.d, 24) && bit(seven.d, 25) &&
                   (saved & kTiles) == kTiles;  // bf16, tile, int8
  found.set(Isa::avx2, avx2 && PAGEMILL_HAVE_AVX2);
  found.set(Isa::avx2_vnni, bit(seven_one.a, 4) && PAGEMILL_HAVE_AVX2_VNNI);
  found.set(Isa::avx512, avx512 && PAGEMILL_HAVE_AVX512);
  found.set(Isa::avx512_vnni, bit(seven.c, 11) && PAGEMILL_HAVE_AVX512_VNNI);
  found.set(Isa::avx512_bf16, bit(seven_one.a, 5) && PAGEMILL_HAVE_AVX512_BF16);
  found.set(Isa::amx, amx && PAGEMILL_HAVE_AMX);
  // Asked for last: only a process that will use tiles asks.
  if (found.has[static_cast<int>(Isa::amx)]) found.set(Isa::amx, ask_for_tiles());
  return found;
}

#else

struct Features {
  bool has[kNumIsas] = {true};
};

Features detect() { return {}; }

#endif

bool available(Isa isa) {
  static const Features features = detect();
  return features.has[static_cast<int>(isa)];
}

// -1: the best one.
std::atomic<int> forced{-1};

}  // namespace

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

Isa best_isa() {
  for (Isa isa : kBestFirst)
    if (available(isa)) return isa;
  return Isa::portable;
}

Isa active_isa() {
  static const Isa best = best_isa();
  const int chosen = forced.load(std::memory_order_relaxed);
  return chosen < 0 ? best : static_cast<Isa>(chosen);
}

std::string available_isas() {
  std::string names;
  for (Isa isa : kBestFirst) {
    if (!available(isa)) continue;
    if (!names.empty()) names += ", ";
    names += isa_name(isa);
  }
  return names;
}

void force_isa(const std::string& name) {
  for (Isa isa : kBestFirst) {
    if (available(isa) && name == isa_name(isa)) {
      forced.store(static_cast<int>(isa), std::memory_order_relaxed);
      return;
    }
  }
  throw std::invalid_argument("no kernels for the instruction set '" + name +
                              "' on this machine; available: " + available_isas());
}

}  // namespace pagemill
