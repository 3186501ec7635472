// Which instruction set the kernels use: found out by cpuid and xgetbv, chosen once, forced by tests.
//
// An operation has one function for the portable path and others where they are worth it; `Table`
// holds them and `pick` takes the best one that the chosen path allows. The chosen path is a
// constant of the process for a user: bits may differ between paths, never within one.
#pragma once

#include <string>

namespace pagemill {

// In rising order: each path may run the functions of all paths before it. On Arm there is only the
// first.
enum class Isa : int { portable = 0, avx2, avx512, avx512_bf16, amx };
inline constexpr int kNumIsas = 5;

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

// One function pointer a path; a null one falls through to the path before it.
template <typename Fn>
struct Table {
  Fn fns[kNumIsas];
};

template <typename Fn>
Fn pick(const Table<Fn>& table) {
  int i = static_cast<int>(active_isa());
  while (i > 0 && table.fns[i] == nullptr) --i;
  return table.fns[i];
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
#if PAGEMILL_HAVE_AMX
#define PAGEMILL_IF_AMX(fn) fn
#else
#define PAGEMILL_IF_AMX(fn) nullptr
#endif
