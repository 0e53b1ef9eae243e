// Activations with AVX-512; the same operations as the portable loop.
#if defined(__x86_64__)
#include <immintrin.h>

#include "quantize_body.h"

namespace minisgl {
namespace {

inline int32_t max_lanes(__m512i a) {
  const __m256i eight = _mm256_max_epi32(_mm512_castsi512_si256(a),
                                         _mm512_extracti64x4_epi64(a, 1));
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight),
                                     _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1)));
}

inline GroupResult quantize_group(const float* x, int8_t* codes) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
  const __m512i low_bits = _mm512_and_si512(_mm512_castps_si512(low), magnitude);
  const __m512i high_bits = _mm512_and_si512(_mm512_castps_si512(high), magnitude);
  const int32_t top = max_lanes(_mm512_max_epi32(low_bits, high_bits));
  const float amax = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(top)));
  if (top >= 0x7f800000 || amax < kSmallest) return empty_group(amax, codes);
  const __m512 inverse = _mm512_set1_ps(127.0f / amax);
  const __m128i low_code = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)));
  const __m128i high_code = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(high, inverse)));
  const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(low_code), high_code, 1);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
  // Four sums of four codes in each half.
  __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
  sums = _mm256_add_epi32(sums, _mm256_unpackhi_epi64(sums, sums));
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 1));
  return {amax / 127.0f, _mm256_cvtsi256_si32(sums),
          _mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1))};
}

}  // namespace

void quantize_avx512(const QuantizeTask& task) { quantize_groups(task, quantize_group); }

}  // namespace minisgl
#endif
