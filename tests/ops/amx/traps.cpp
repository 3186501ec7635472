// Carries out AMX instructions that the processor lacks: each raises SIGILL, whose handler decodes it,
// does in plain C++ what the manual says, and goes on behind it. So the file that machines with AMX run
// is tested byte for byte, but for the speed and for the silicon itself.
//
// Encodings are those of Intel's Software Developer's Manual, volume 2: three-byte VEX, map 0F38.
#include <signal.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/tiles_emulated.h"

namespace {

constexpr int kGeneral[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                              REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                              REG_R12, REG_R13, REG_R14, REG_R15};
struct sigaction before;
uint64_t count;

// A VEX instruction taken apart.
struct Decoded {
  const uint8_t* next;  // behind it
  int opcode, prefix;   // prefix: 0 none, 1 66, 2 F3, 3 F2
  int mod, reg, rm, vvvv;
  uint64_t address;  // base and displacement
  int64_t index;     // scaled
};

// Read a memory operand behind the ModRM byte.
void decode_memory(Decoded& d, const greg_t* registers, const uint8_t* at, bool more_index,
                   bool more_base) {
  int base = d.rm | (more_base ? 8 : 0);
  bool has_base = true;
  if (d.rm == 4) {
    const uint8_t sib = *at++;
    const int index = ((sib >> 3) & 7) | (more_index ? 8 : 0);
    base = (sib & 7) | (more_base ? 8 : 0);
    if (index != 4) d.index = registers[kGeneral[index]] * (int64_t{1} << (sib >> 6));
    has_base = !(d.mod == 0 && (sib & 7) == 5);
  } else if (d.mod == 0 && d.rm == 5) {
    std::fprintf(stderr, "traps: an operand relative to the instruction is not known here\n");
    std::abort();
  }
  int32_t displacement = 0;
  if (d.mod == 1) {
    displacement = static_cast<int8_t>(*at++);
  } else if (d.mod == 2 || !has_base) {
    std::memcpy(&displacement, at, 4);
    at += 4;
  }
  d.address = (has_base ? static_cast<uint64_t>(registers[kGeneral[base]]) : 0) +
              static_cast<uint64_t>(static_cast<int64_t>(displacement));
  d.next = at;
}

bool decode(Decoded& d, const greg_t* registers) {
  const uint8_t* at = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  if (at[0] != 0xc4 || (at[1] & 0x1f) != 2) return false;
  d = {};
  d.prefix = at[2] & 3;
  d.vvvv = (~at[2] >> 3) & 15;
  d.opcode = at[3];
  d.mod = at[4] >> 6;
  d.reg = (at[4] >> 3) & 7;
  d.rm = at[4] & 7;
  d.next = at + 5;
  if (d.mod != 3) decode_memory(d, registers, at + 5, !(at[1] & 0x40), !(at[1] & 0x20));
  return true;
}

bool run(const Decoded& d) {
  pagemill::TileRegisters& tiles = pagemill::tile_registers();
  const bool memory = d.mod != 3;
  void* where = reinterpret_cast<void*>(d.address);
  if (d.opcode == 0x49 && d.prefix == 0 && memory) {
    tiles.configure(where);  // LDTILECFG
  } else if (d.opcode == 0x49 && d.prefix == 0) {
    tiles.release();  // TILERELEASE
  } else if (d.opcode == 0x49 && d.prefix == 3 && !memory) {
    tiles.zero(d.reg);  // TILEZERO
  } else if (d.opcode == 0x4b && d.prefix == 3 && memory) {
    tiles.load(d.reg, where, d.index);  // TILELOADD
  } else if (d.opcode == 0x4b && d.prefix == 2 && memory) {
    tiles.store(d.reg, where, d.index);  // TILESTORED
  } else if (d.opcode == 0x5c && d.prefix == 2 && !memory) {
    tiles.dot_bf16(d.reg, d.rm, d.vvvv);  // TDPBF16PS
  } else if (d.opcode == 0x5e && d.prefix == 2 && !memory) {
    tiles.dot_bytes(d.reg, d.rm, d.vvvv);  // TDPBSUD
  } else {
    return false;
  }
  return true;
}

void handle(int, siginfo_t*, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  Decoded d;
  if (!decode(d, registers) || !run(d)) {
    // Not ours: whoever was asked before is asked again.
    sigaction(SIGILL, &before, nullptr);
    return;
  }
  __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);
  registers[REG_RIP] = reinterpret_cast<greg_t>(d.next);
}

}  // namespace

extern "C" {

void amx_install_traps() {
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, &before);
}

void amx_remove_traps() { sigaction(SIGILL, &before, nullptr); }

// How many instructions were carried out.
uint64_t amx_count_traps() { return __atomic_load_n(&count, __ATOMIC_RELAXED); }
}
