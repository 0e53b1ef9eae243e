// Activations with AVX2; the same operations as the portable loop.
#if defined(__x86_64__)
#include <immintrin.h>

#include "quantize_body.h"

namespace minisgl {
namespace {

inline int32_t sum_lanes(__m256i a) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
}

inline int32_t max_lanes(__m256i a) {
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1)));
}

inline GroupResult quantize_group(const float* x, int8_t* codes) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i largest = _mm256_setzero_si256();
  __m256 value[4];
  for (int i = 0; i < 4; ++i) {
    value[i] = _mm256_loadu_ps(x + 8 * i);
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(value[i]), magnitude);
    largest = _mm256_max_epi32(largest, bits);
  }
  const int32_t top = max_lanes(largest);
  const float amax = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(top)));
  if (top >= 0x7f800000 || amax < kSmallest) return empty_group(amax, codes);
  const __m256 inverse = _mm256_set1_ps(127.0f / amax);
  __m256i code[4];
  for (int i = 0; i < 4; ++i) code[i] = _mm256_cvtps_epi32(_mm256_mul_ps(value[i], inverse));
  const __m256i low = _mm256_packs_epi32(code[0], code[1]);
  const __m256i high = _mm256_packs_epi32(code[2], code[3]);
  // The packs work within 128-bit halves; the permutation puts dwords back in order.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
  return {amax / 127.0f, sum_lanes(_mm256_add_epi32(code[0], code[1])),
          sum_lanes(_mm256_add_epi32(code[2], code[3]))};
}

}  // namespace

void quantize_avx2(const QuantizeTask& task) { quantize_groups(task, quantize_group); }

void relate_avx2(const ActivationTile& x, int64_t groups) { relate_tile(x, groups); }

}  // namespace minisgl
#endif
