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
  __m512i sum[12] = {};
  const __m512i a = _mm512_set1_epi32(static_cast<int>(steps)), b = _mm512_set1_epi8(3);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
    for (auto& lane : sum) {
      lane = _mm512_dpbusd_epi32(lane, a, b);
      __asm__ volatile("" : "+v"(lane));  // keep all twelve
    }
  }
  __m512i all = sum[0];
  for (const auto& lane : sum) all = _mm512_add_epi32(all, lane);
  return static_cast<uint64_t>(_mm512_reduce_add_epi32(all));
}

}  // namespace

ProbeFns probe_avx512() { return {read_lines, multiply, 12 * 64 * 2}; }

}  // namespace minisgl
#endif
