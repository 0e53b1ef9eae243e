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

constexpr int64_t kBlock = 16;  // tokens whose groups are quantised together

// One vector out of four, 128 bits of each at a time: lane i of a quarter is op over the quarter of
// vector i.
template <class Op>
inline __m512i fold_quarters(const __m512i* a, Op op) {
  const __m512i x = op(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
  const __m512i y = op(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
  return op(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
}

// Lane i is the largest lane of a[i].
inline __m512i fold_max(const __m512i* a) {
  const auto op = [](__m512i x, __m512i y) { return _mm512_max_epi32(x, y); };
  const auto halves = [op](__m512i x, __m512i y) {
    return op(_mm512_shuffle_i32x4(x, y, 0x88), _mm512_shuffle_i32x4(x, y, 0xdd));
  };
  return halves(halves(fold_quarters(a, op), fold_quarters(a + 4, op)),
                halves(fold_quarters(a + 8, op), fold_quarters(a + 12, op)));
}

// The same group of 16 tokens; false, with nothing written, if one of them is tiny or not finite.
inline bool quantize_block(const float* x, int64_t stride, const ActivationTile& out) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i largest[kBlock];
  for (int64_t t = 0; t < kBlock; ++t) {
    const __m512i low = _mm512_loadu_si512(x + t * stride);
    const __m512i high = _mm512_loadu_si512(x + t * stride + 16);
    largest[t] = _mm512_max_epi32(_mm512_and_si512(low, magnitude),
                                  _mm512_and_si512(high, magnitude));
  }
  const __m512i top = fold_max(largest);
  const __m512 amax = _mm512_castsi512_ps(top);
  const __mmask16 finite = _mm512_cmplt_epi32_mask(top, _mm512_set1_epi32(0x7f800000));
  const __mmask16 good = _mm512_mask_cmp_ps_mask(finite, amax, _mm512_set1_ps(kSmallest),
                                                 _CMP_GE_OQ);
  if (good != 0xffff) return false;
  alignas(64) float inverse[kBlock];
  _mm512_store_ps(inverse, _mm512_div_ps(_mm512_set1_ps(127.0f), amax));
  // The packs work within quarters; the permutation puts four codes each back in order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i sums[kBlock / 2];  // of two tokens: four sums each of four codes in the lower half, ...
  for (int64_t t = 0; t < kBlock; t += 2) {
    __m512i half[2];
    for (int i = 0; i < 2; ++i) {
      const float* from = x + (t + i) * stride;
      const __m512 factor = _mm512_set1_ps(inverse[t + i]);
      half[i] = _mm512_packs_epi32(
          _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from), factor)),
          _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from + 16), factor)));
    }
    const __m512i mixed = _mm512_packs_epi16(half[0], half[1]);
    const __m512i codes = _mm512_permutexvar_epi32(order, mixed);
    _mm512_storeu_si512(out.codes + t * kGroup, codes);
    sums[t / 2] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), codes);
  }
  const auto add = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
  const __m512i early = fold_quarters(sums, add), late = fold_quarters(sums + 4, add);
  // Quarters: lower halves of even tokens, their upper halves, then of odd tokens.
  const __m512i lower = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 16, 24, 17, 25, 18, 26, 19, 27);
  const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(4));
  const __m512i low = _mm512_permutex2var_epi32(early, lower, late);
  const __m512i high = _mm512_permutex2var_epi32(early, upper, late);
  const __m512i sum = _mm512_add_epi32(low, high);
  const __m512 scale = _mm512_div_ps(amax, _mm512_set1_ps(127.0f));
  _mm512_storeu_ps(out.scale, scale);
  _mm512_storeu_ps(out.scaled_sum, _mm512_mul_ps(scale, _mm512_cvtepi32_ps(sum)));
  const auto store_minus = [&](CodeSum which, __m512i value) {
    const __m512i minus = _mm512_sub_epi32(_mm512_setzero_si512(), value);
    const __m128i bits = _mm_cvtsi32_si128(offset_bits(which));
    _mm512_storeu_si512(out.minus_sum[which], _mm512_sll_epi32(minus, bits));
  };
  store_minus(kWholeSum, sum);
  store_minus(kLowSum, low);
  store_minus(kHighSum, high);
  _mm512_storeu_si512(out.start, _mm512_mullo_epi32(sum, _mm512_set1_epi32(sum_start(1))));
  return true;
}

}  // namespace

void quantize_avx512(const QuantizeTask& task) {
  const int64_t groups = task.columns / kGroup < task.groups ? task.columns / kGroup : task.groups;
  const int64_t tokens = task.tokens / kBlock * kBlock;
  const auto part = [&](int64_t g, int64_t num_groups, int64_t t, int64_t num_tokens) {
    QuantizeTask result = task;
    result.x += t * task.x_stride + g * kGroup;
    result.tokens = num_tokens;
    result.groups = num_groups;
    result.columns -= g * kGroup;
    result.out = task.out.from(g, t);
    return result;
  };
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t t = 0; t < tokens; t += kBlock) {
      const QuantizeTask block = part(g, 1, t, kBlock);
      if (!quantize_block(block.x, block.x_stride, block.out)) {
        quantize_groups(block, quantize_group);
      }
    }
  }
  if (groups < task.groups) quantize_groups(part(groups, 1, 0, tokens), quantize_group);
  quantize_groups(part(0, task.groups, tokens, task.tokens - tokens), quantize_group);
}

void relate_avx512(const ActivationTile& x, int64_t groups) { relate_tile(x, groups); }

}  // namespace minisgl
#endif
