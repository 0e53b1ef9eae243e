#if defined(__x86_64__)
#include <immintrin.h>

#include "probe.h"

namespace minisgl {
namespace {

uint64_t read_lines(const uint8_t* data, int64_t bytes) {
  __m512i sum[4] = {};
  for (int64_t i = 0; i < bytes; i += 256) {
    for (int j = 0; j < 4; ++j) {
      sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(data + i + 64 * j));
    }
  }
  const __m512i all =
      _mm512_or_si512(_mm512_or_si512(sum[0], sum[1]), _mm512_or_si512(sum[2], sum[3]));
  return static_cast<uint64_t>(_mm512_reduce_or_epi64(all));
}

uint64_t multiply(int64_t steps) {
  const __m512i a = _mm512_set1_epi32(static_cast<int>(steps)), b = _mm512_set1_epi8(3);
  __m512i s0 = a, s1 = a, s2 = a, s3 = a, s4 = a, s5 = a, s6 = a, s7 = a, s8 = a, s9 = a, s10 = a,
          s11 = a;
  // In assembly, because a compiler moves these sums to memory and back.
  for (int64_t i = 0; i < steps; ++i) {
    __asm__ volatile(
        "vpdpbusd %[b], %[a], %[s0]\n vpdpbusd %[b], %[a], %[s1]\n"
        "vpdpbusd %[b], %[a], %[s2]\n vpdpbusd %[b], %[a], %[s3]\n"
        "vpdpbusd %[b], %[a], %[s4]\n vpdpbusd %[b], %[a], %[s5]\n"
        "vpdpbusd %[b], %[a], %[s6]\n vpdpbusd %[b], %[a], %[s7]\n"
        "vpdpbusd %[b], %[a], %[s8]\n vpdpbusd %[b], %[a], %[s9]\n"
        "vpdpbusd %[b], %[a], %[s10]\n vpdpbusd %[b], %[a], %[s11]\n"
        : [s0] "+v"(s0), [s1] "+v"(s1), [s2] "+v"(s2), [s3] "+v"(s3), [s4] "+v"(s4),
          [s5] "+v"(s5), [s6] "+v"(s6), [s7] "+v"(s7), [s8] "+v"(s8), [s9] "+v"(s9),
          [s10] "+v"(s10), [s11] "+v"(s11)
        : [a] "v"(a), [b] "v"(b));
  }
  const __m512i all[12] = {s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11};
  __m512i total = a;
  for (const auto& lane : all) total = _mm512_add_epi32(total, lane);
  return static_cast<uint64_t>(_mm512_reduce_add_epi32(total));
}

}  // namespace

ProbeFns probe_avx512() { return {read_lines, multiply, 12 * 64 * 2}; }

}  // namespace minisgl
#endif
