// Which instruction set the kernels use: found out by cpuid and xgetbv, chosen once, forced by tests.
//
// An operation has one function for the portable path and others where they are worth it; `Table`
// holds them and `pick` takes the best one that the chosen path allows. The chosen path is a
// constant of the process for a user: bits may differ between paths, never within one.
#pragma once

#include <string>

namespace pagemill {

// The paths, as places in tables. What a path may run besides its own is a chain:
//
//   amx > avx512_bf16 > avx512_vnni > avx512 > avx2 > portable        avx2_vnni > avx2
//
// VNNI multiplies bytes: with AVX-512 from Cascade Lake on, with AVX2 alone from Alder Lake on. On Arm
// there is only the first.
enum class Isa : int { portable = 0, avx2, avx512, avx512_bf16, amx, avx2_vnni, avx512_vnni };
inline constexpr int kNumIsas = 7;

// The path whose functions `isa` runs where it has none of its own; portable's is portable.
constexpr Isa isa_before(Isa isa) {
  switch (isa) {
    case Isa::amx: return Isa::avx512_bf16;
    case Isa::avx512_bf16: return Isa::avx512_vnni;
    case Isa::avx512_vnni: return Isa::avx512;
    case Isa::avx512:
    case Isa::avx2_vnni: return Isa::avx2;
    default: return Isa::portable;
  }
}

// The name of a path, as PAGEMILL_CPU_ISA spells it.
const char* isa_name(Isa isa);

// The best path of this machine that was also compiled.
Isa best_isa();

// The path in use: the best one unless `force_isa` chose another.
Isa active_isa();

// Use the path called `name`. Throws std::invalid_argument, naming the available ones, when the
// machine or the build lacks it.
void force_isa(const std::string& name);

// The names of the paths this machine can run, best first, separated by commas.
std::string available_isas();

// One function pointer a path, in the order of Isa; a null one falls through to the path before it.
template <typename Fn>
struct Table {
  Fn fns[kNumIsas];
};

template <typename Fn>
Fn pick(const Table<Fn>& table) {
  Isa isa = active_isa();
  while (isa != Isa::portable && table.fns[static_cast<int>(isa)] == nullptr) isa = isa_before(isa);
  return table.fns[static_cast<int>(isa)];
}

}  // namespace pagemill

// Entries of a Table: the function where its file was compiled (CMake defines PAGEMILL_HAVE_*).
#if PAGEMILL_HAVE_AVX2
#define PAGEMILL_IF_AVX2(fn) fn
#else
#define PAGEMILL_IF_AVX2(fn) nullptr
#endif
#if PAGEMILL_HAVE_AVX512
#define PAGEMILL_IF_AVX512(fn) fn
#else
#define PAGEMILL_IF_AVX512(fn) nullptr
#endif
#if PAGEMILL_HAVE_AVX512_BF16
#define PAGEMILL_IF_AVX512_BF16(fn) fn
#else
#define PAGEMILL_IF_AVX512_BF16(fn) nullptr
#endif
#if PAGEMILL_HAVE_AVX2_VNNI
#define PAGEMILL_IF_AVX2_VNNI(fn) fn
#else
#define PAGEMILL_IF_AVX2_VNNI(fn) nullptr
#endif
#if PAGEMILL_HAVE_AVX512_VNNI
#define PAGEMILL_IF_AVX512_VNNI(fn) fn
#else
#define PAGEMILL_IF_AVX512_VNNI(fn) nullptr
#endif
#if PAGEMILL_HAVE_AMX
#define PAGEMILL_IF_AMX(fn) fn
#else
#define PAGEMILL_IF_AMX(fn) nullptr
#endif
