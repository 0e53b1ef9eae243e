// Without VNNI the rate is that of vpmaddubsw followed by an addition in 16 bits.
#if defined(__x86_64__)
#include <immintrin.h>

#include "probe.h"

namespace minisgl {
namespace {

uint64_t fold(__m256i a) {
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  return static_cast<uint64_t>(_mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1));
}

uint64_t read_lines(const uint8_t* data, int64_t bytes) {
  __m256i sum[4] = {};
  for (int64_t i = 0; i < bytes; i += 128) {
    for (int j = 0; j < 4; ++j) {
      const auto* line = reinterpret_cast<const __m256i*>(data + i + 32 * j);
      sum[j] = _mm256_xor_si256(sum[j], _mm256_loadu_si256(line));
    }
  }
  return fold(_mm256_or_si256(_mm256_or_si256(sum[0], sum[1]), _mm256_or_si256(sum[2], sum[3])));
}

uint64_t multiply(int64_t steps) {
  __m256i sum[12] = {};
  __m256i a = _mm256_set1_epi32(static_cast<int>(steps)), b = _mm256_set1_epi8(3);
  for (int64_t s = 0; s < steps; ++s) {
    __asm__ volatile("" : "+x"(a), "+x"(b));  // the products must not leave the loop
#pragma GCC unroll 16
    for (auto& lane : sum) {
      lane = _mm256_add_epi16(lane, _mm256_maddubs_epi16(a, b));
      __asm__ volatile("" : "+x"(lane), "+x"(a));
    }
  }
  __m256i all = sum[0];
  for (const auto& lane : sum) all = _mm256_add_epi16(all, lane);
  return fold(all);
}

}  // namespace

ProbeFns probe_avx2() { return {read_lines, multiply, 12 * 32 * 2}; }

}  // namespace minisgl
#endif
