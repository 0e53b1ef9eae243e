// AVX2: a vector of 16 floats is two registers.
#if defined(__x86_64__)
#include <immintrin.h>

#include "attention_table.h"

namespace minisgl {
namespace {

struct Avx2 {
  static constexpr int kRows = 6, kVecs = 1;  // 12 sums in registers
  struct Vec {
    __m256 low, high;
  };

  static MINISGL_INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static MINISGL_INLINE Vec load(const float* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
  }
  static MINISGL_INLINE void store(float* p, Vec a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
  }
  static MINISGL_INLINE Vec broadcast(float x) {
    const __m256 all = _mm256_set1_ps(x);
    return {all, all};
  }
  static MINISGL_INLINE Vec add(Vec a, Vec b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
  }
  static MINISGL_INLINE Vec sub(Vec a, Vec b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
  }
  static MINISGL_INLINE Vec mul(Vec a, Vec b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
  }
  static MINISGL_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  static MINISGL_INLINE Vec max(Vec a, Vec b) {  // a > b ? a : b
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
  }
  static MINISGL_INLINE float first(Vec a) { return _mm256_cvtss_f32(a.low); }

  static MINISGL_INLINE __m256 widen_bfloat16(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static MINISGL_INLINE Vec load_bfloat16(const uint16_t* p) {
    return {widen_bfloat16(p), widen_bfloat16(p + 8)};
  }
  static MINISGL_INLINE __m256 widen_float16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static MINISGL_INLINE Vec load_float16(const uint16_t* p) {
    return {widen_float16(p), widen_float16(p + 8)};
  }
  static MINISGL_INLINE __m256 widen_int8(const int8_t* p) {
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
  }
  static MINISGL_INLINE Vec load_int8(const int8_t* p) {
    return {widen_int8(p), widen_int8(p + 8)};
  }
  static MINISGL_INLINE void store_float16(uint16_t* p, Vec a) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.low, kNearest));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.high, kNearest));
  }

  // 2^n where the low bits of `shifted` hold n + 2^22.
  static MINISGL_INLINE __m256 power(__m256 shifted) {
    const __m256i n = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
  }
  static MINISGL_INLINE Vec power_of_two(Vec shifted) {
    return {power(shifted.low), power(shifted.high)};
  }
  static MINISGL_INLINE Vec zero_where_less(Vec x, Vec bound, Vec a) {
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.low, bound.low, _CMP_LT_OQ), a.low),
            _mm256_andnot_ps(_mm256_cmp_ps(x.high, bound.high, _CMP_LT_OQ), a.high)};
  }

  // Lane i with i + 8, then i + 4, i + 2, i + 1.
  static MINISGL_INLINE float sum(Vec a) {
    const __m256 eight = _mm256_add_ps(a.low, a.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static MINISGL_INLINE float largest(Vec a) {
    const __m256 eight = _mm256_max_ps(a.low, a.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  // Four columns of 16 rows: out[i * out_stride + r] = rows[r * stride + i].
  static MINISGL_INLINE void transpose4(const float* rows, int64_t stride, float* out,
                                        int64_t out_stride) {
    for (int half = 0; half < 2; ++half, rows += 8 * stride, out += 8) {
      __m256 y[4];
      for (int r = 0; r < 4; ++r) {
        y[r] = _mm256_castps128_ps256(_mm_loadu_ps(rows + r * stride));
        y[r] = _mm256_insertf128_ps(y[r], _mm_loadu_ps(rows + (4 + r) * stride), 1);
      }
      const __m256 a = _mm256_unpacklo_ps(y[0], y[1]), b = _mm256_unpackhi_ps(y[0], y[1]);
      const __m256 c = _mm256_unpacklo_ps(y[2], y[3]), e = _mm256_unpackhi_ps(y[2], y[3]);
      _mm256_storeu_ps(out, _mm256_shuffle_ps(a, c, 0x44));
      _mm256_storeu_ps(out + out_stride, _mm256_shuffle_ps(a, c, 0xee));
      _mm256_storeu_ps(out + 2 * out_stride, _mm256_shuffle_ps(b, e, 0x44));
      _mm256_storeu_ps(out + 3 * out_stride, _mm256_shuffle_ps(b, e, 0xee));
    }
  }
};

}  // namespace

const AttentionKernels& attention_kernels_avx2() { return attention_table<Avx2>(); }

}  // namespace minisgl
#endif
