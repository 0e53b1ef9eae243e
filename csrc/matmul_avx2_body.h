// AVX2: a register holds 8 rows by 4 columns. Included by matmul_avx2.cpp and matmul_avxvnni.cpp,
// which differ in how four products are added up.
//
// Without VNNI, vpmaddubsw adds two products in 16 bits and saturates. Codes of 4 bits allow all 16
// products of a group per lane (15 * 127 * 16 < 32768), 5 bits 8 of them, 6 bits 4, before they
// must be widened. For 8 bits the codes are made signed, and their sign moves to the activation:
// 128 * 127 * 2 still fits.
#pragma once

#include <immintrin.h>

#include "matmul_body.h"
#include "matmul_float_body.h"

namespace minisgl {
namespace {

template <bool kVnni>
struct Avx2 {
  static constexpr int kLanes = 8;
  static constexpr int kUnitsFew = 2;
  static constexpr int kUnitsMany = 1;
  static constexpr int kTokens = 4;
  template <int kBits>
  static constexpr bool kNeedsCorrection = kVnni || kBits != 8;
  using Int = __m256i;
  using Float = __m256;

  static MINISGL_INLINE Int load(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static MINISGL_INLINE Int load(const int32_t* p) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  }
  static MINISGL_INLINE void store(int32_t* p, Int a) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(p), a);
  }
  static MINISGL_INLINE Int load_low16(const uint8_t* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static MINISGL_INLINE Int scale16(Int a, Int b) { return _mm256_mulhrs_epi16(a, b); }
  static MINISGL_INLINE Int dot16(Int sum, Int a, Int b) {
#if defined(__AVXVNNI__)
    if constexpr (kVnni) return _mm256_dpwssd_avx_epi32(sum, a, b);
#endif
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
  }
  static MINISGL_INLINE Int zero() { return _mm256_setzero_si256(); }
  static MINISGL_INLINE Int broadcast(const int32_t* p) { return _mm256_set1_epi32(*p); }
  template <int kBits>
  static MINISGL_INLINE Int shift_right(Int a) {
    return _mm256_srai_epi32(a, kBits);
  }
  static MINISGL_INLINE Int prepare8(Int codes) {
    if constexpr (kVnni) return codes;
    return _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
  }
  static MINISGL_INLINE Int low_nibbles(Int a) {
    return _mm256_and_si256(a, _mm256_set1_epi8(15));
  }
  static MINISGL_INLINE Int high_nibbles(Int a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }

  template <int kShift, int kMask>
  static MINISGL_INLINE Int or_bits(Int a, Int b) {
    if constexpr (kShift > 0) b = _mm256_slli_epi16(b, kShift);
    if constexpr (kShift < 0) b = _mm256_srli_epi16(b, -kShift);
    return _mm256_or_si256(a, _mm256_and_si256(b, _mm256_set1_epi8(kMask)));
  }

  static MINISGL_INLINE Float load_half(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static MINISGL_INLINE Float broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static MINISGL_INLINE Float zero_float() { return _mm256_setzero_ps(); }
  static MINISGL_INLINE Float load_float(const float* p) { return _mm256_loadu_ps(p); }
  static MINISGL_INLINE void store(float* p, Float a) { _mm256_storeu_ps(p, a); }
  static MINISGL_INLINE Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static MINISGL_INLINE Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static MINISGL_INLINE Float to_float(Int a) { return _mm256_cvtepi32_ps(a); }

  static MINISGL_INLINE Int columns(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
  }

  // Sums of pairs of products in 16 bits.
  template <int kBits>
  static MINISGL_INLINE Int pairs(Int code, Int x) {
    if constexpr (kBits == 8) {
      return _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(x, code));
    }
    return _mm256_maddubs_epi16(code, x);
  }

  template <int kBits, int kCount, int P, int U, class B>
  static MINISGL_INLINE void dot(const B (&block)[P], int first, const int8_t* x,
                                 Int (&sum)[P][U]) {
#if defined(__AVXVNNI__)
    if constexpr (kVnni) {
#pragma GCC unroll 8
      for (int v = first; v < first + kCount; ++v) {
#pragma GCC unroll 8
        for (int u = 0; u < U; ++u) {
          const Int four = columns(x + u * kGroup + v * 4);
          for (int p = 0; p < P; ++p) {
            sum[p][u] = _mm256_dpbusd_avx_epi32(sum[p][u], block[p].code[v], four);
          }
        }
      }
      return;
    }
#endif
    constexpr int kRun = kBits == 4 ? 8 : kBits == 5 ? 4 : kBits == 6 ? 2 : 1;
    const Int ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
#pragma GCC unroll 8
      for (int v = first; v < first + kCount; v += kRun) {
        for (int p = 0; p < P; ++p) {
          const int8_t* at = x + u * kGroup;
          Int narrow = pairs<kBits>(block[p].code[v], columns(at + v * 4));
#pragma GCC unroll 8
          for (int i = v + 1; i < v + kRun; ++i) {
            narrow = _mm256_add_epi16(narrow, pairs<kBits>(block[p].code[i], columns(at + i * 4)));
          }
          sum[p][u] = _mm256_add_epi32(sum[p][u], _mm256_madd_epi16(narrow, ones));
        }
      }
    }
  }
};

struct FloatAvx2 {
  static constexpr int kRows = 2, kTokens = 3;
  struct Vec {
    __m256 low, high;
  };

  static MINISGL_INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static MINISGL_INLINE Vec load(const float* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
  }
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
  static MINISGL_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  static MINISGL_INLINE float sum(Vec a) {
    const __m256 eight = _mm256_add_ps(a.low, a.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
};

}  // namespace
}  // namespace minisgl
