#include "isa.h"

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace minisgl {
namespace {

const char* const kNames[kNumIsas] = {"portable", "neon", "avx2", "avxvnni", "avx512"};

#if defined(__x86_64__)
// Bits of leaves 1 and 7; the operating system must also save the wide registers (XCR0).
struct X86Features {
  bool avx2 = false, avxvnni = false, avx512 = false;

  X86Features() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool osxsave = c >> 27 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1, avx = c >> 28 & 1;
    if (!osxsave || !fma || !f16c || !avx) return;
    unsigned lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    const bool ymm = (lo & 0x6) == 0x6, zmm = (lo & 0xe6) == 0xe6;
    if (!ymm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx2 = b >> 5 & 1;
    const bool f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1;
    const bool vnni = c >> 11 & 1;
    avx512 = avx2 && zmm && f && dq && bw && vl && vnni;
    const unsigned leaves = a;
    if (leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) avxvnni = avx2 && (a >> 4 & 1);
  }
};
#endif

Isa best_isa() {
  for (int i = kNumIsas - 1; i > 0; --i) {
    if (isa_available(static_cast<Isa>(i))) return static_cast<Isa>(i);
  }
  return Isa::kPortable;
}

std::atomic<int>& chosen() {
  static std::atomic<int> isa{static_cast<int>(best_isa())};
  return isa;
}

}  // namespace

bool isa_available(Isa isa) {
  if (isa == Isa::kPortable) return true;
#if defined(__x86_64__)
  static const X86Features cpu;
  if (isa == Isa::kAvx2) return cpu.avx2;
  if (isa == Isa::kAvxVnni) return cpu.avxvnni;
  if (isa == Isa::kAvx512) return cpu.avx512;
  return false;
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kDotProduct = 1ul << 20;  // HWCAP_ASIMDDP
  return isa == Isa::kNeon && (getauxval(AT_HWCAP) & kDotProduct) != 0;
#elif defined(__aarch64__)
  return isa == Isa::kNeon;  // every Apple processor of this architecture has it
#else
  return false;
#endif
}

Isa current_isa() { return static_cast<Isa>(chosen().load(std::memory_order_relaxed)); }

bool set_isa(Isa isa) {
  if (!isa_available(isa)) return false;
  chosen().store(static_cast<int>(isa), std::memory_order_relaxed);
  return true;
}

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

bool isa_from_name(const char* name, Isa* isa) {
  for (int i = 0; i < kNumIsas; ++i) {
    if (std::strcmp(name, kNames[i]) == 0) {
      *isa = static_cast<Isa>(i);
      return true;
    }
  }
  return false;
}

}  // namespace minisgl
