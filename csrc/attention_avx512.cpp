// AVX-512: a vector of 16 floats is one register.
#if defined(__x86_64__)
#include <immintrin.h>

#include "attention_table.h"

namespace minisgl {
namespace {

struct Avx512 {
  static constexpr int kRows = 6, kSums = 24;
  static constexpr bool kDirect = true;   // few rows read keys where they lie
  static constexpr bool kScales = true;   // powers of two in one instruction
  static constexpr int64_t kTurned = 64;  // bytes of keys, one column, turned at once
  using Vec = __m512;
  using Ints = __m512i;   // 16 sums
  using Pairs = __m512i;  // 16 of them, or one 16 times

  static MINISGL_INLINE Vec zero() { return _mm512_setzero_ps(); }
  static MINISGL_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static MINISGL_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
  static MINISGL_INLINE Vec broadcast(float x) { return _mm512_set1_ps(x); }
  static MINISGL_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static MINISGL_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static MINISGL_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static MINISGL_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static MINISGL_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static MINISGL_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // a > b ? a : b
  static MINISGL_INLINE float first(Vec a) { return _mm512_cvtss_f32(a); }

  static MINISGL_INLINE Vec load_bfloat16(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static MINISGL_INLINE Vec load_float16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static MINISGL_INLINE void store_float16(uint16_t* p, Vec a) {
    const __m256i half = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
  }

  static MINISGL_INLINE Ints zero_ints() { return _mm512_setzero_si512(); }
  static MINISGL_INLINE Vec to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
  static MINISGL_INLINE Pairs load_pairs(const Pair* p) { return _mm512_loadu_si512(p); }
  static MINISGL_INLINE void store_pairs(Pair* p, Pairs a) { _mm512_storeu_si512(p, a); }
  static MINISGL_INLINE Pairs broadcast_pair(const Pair* p) {
    int32_t both;
    std::memcpy(&both, p, sizeof(both));
    return _mm512_set1_epi32(both);
  }
  // Both products of each lane, added to its sum. Of the intrinsic GCC keeps copies of the sum.
  static MINISGL_INLINE Ints dot(Pairs a, Pairs b, Ints sum) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }
  // Lane j is the product of key j with a query, for 16 keys and R queries, whose 16 columns each
  // lie there twice: one register holds half of 32 columns of each of two keys.
  template <int R>
  static MINISGL_INLINE void dots(const int16_t* const* keys, const int16_t* queries, int64_t pad,
                                  const int16_t* const* values, Ints (&out)[R]) {
    Ints sum[R][8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const int64_t j = i / 4 * 8 + i % 4;
      const int16_t *a = keys[j], *b = keys[j + 4];
      for (int r = 0; r < R; ++r) sum[r][i] = zero_ints();
      const int16_t* query = queries;
      for (int64_t d = 0; d < pad; d += 16, query += 32) {
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + d));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + d));
        const Pairs both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        for (int r = 0; r < R; ++r) sum[r][i] = dot_memory(both, query + r * 2 * pad, sum[r][i]);
      }
      prefetch_bytes(values[j], pad * 2);
      prefetch_bytes(values[j + 4], pad * 2);
    }
    for (int r = 0; r < R; ++r) out[r] = fold_halves(sum[r]);
  }
  static MINISGL_INLINE Ints dot_memory(Pairs a, const int16_t* b, Ints sum) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "m"(*reinterpret_cast<const Pairs*>(b)));
    return sum;
  }
  // The sum of the eight lanes of each half: those of vector i become lanes i and i + 4, the second
  // four vectors 8 lanes on.
  static MINISGL_INLINE Ints fold_halves(const Ints (&a)[8]) {
    Ints four[4], two[2];
    for (int i = 0; i < 4; ++i) {
      four[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]),
                                 _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
    }
    for (int i = 0; i < 2; ++i) {
      const Vec x = _mm512_castsi512_ps(four[2 * i]), y = _mm512_castsi512_ps(four[2 * i + 1]);
      two[i] = _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)),
                                _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));
    }
    return _mm512_add_epi32(_mm512_shuffle_i32x4(two[0], two[1], 0x88),
                            _mm512_shuffle_i32x4(two[0], two[1], 0xdd));
  }
  static MINISGL_INLINE void store_codes(int16_t* p, Vec a) {  // the low halves of the lanes
    const __m256i codes = _mm512_cvtepi32_epi16(_mm512_castps_si512(a));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes);
  }
  // The low halves of the lanes side by side.
  static MINISGL_INLINE Pairs join_codes(Vec first, Vec second) {
    const __m512i high = _mm512_slli_epi32(_mm512_castps_si512(second), 16);
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_castps_si512(first), high);
  }
  // Pairs of 32 columns of two rows.
  static MINISGL_INLINE void interleave(const int16_t* a, const int16_t* b, Pairs (&out)[2]) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i x = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(a));
    const __m512i y = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(b));
    out[0] = _mm512_unpacklo_epi16(x, y);
    out[1] = _mm512_unpackhi_epi16(x, y);
  }

  // What x is above or below the nearest integer, of two the even one.
  static MINISGL_INLINE Vec fraction(Vec x) {
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // a * 2^n, 0 where x < bound.
  static MINISGL_INLINE Vec scale_from(Vec x, Vec bound, Vec a, Vec n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), a, n);
  }
  // a where x < bound, b elsewhere.
  static MINISGL_INLINE Vec where_less(Vec x, Vec bound, Vec a, Vec b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ), b, a);
  }

  // Lane i with i + 8, then i + 4, i + 2, i + 1.
  static MINISGL_INLINE float sum(Vec a) {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  // Lane r: vector r folded, lane i with i + 8, then i + 4, i + 2, i + 1; two, four and eight
  // vectors share a register as they get shorter.
  template <int R, class Op>
  static MINISGL_INLINE Vec fold(const Vec (&a)[R], Op op) {
    constexpr int kPairs = (R + 1) / 2, kFours = (R + 3) / 4;
    static_assert(R <= 8, "eight vectors fit");
    Vec pair[kPairs], four[kFours];
    for (int i = 0; i < kPairs; ++i) {
      const Vec x = a[2 * i], y = a[2 * i + 1 < R ? 2 * i + 1 : 2 * i];
      pair[i] = op(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
    }
    for (int i = 0; i < kFours; ++i) {
      const Vec x = pair[2 * i], y = pair[2 * i + 1 < kPairs ? 2 * i + 1 : 2 * i];
      four[i] = op(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
    }
    const __m512d x = _mm512_castps_pd(four[0]), y = _mm512_castps_pd(four[kFours - 1]);
    const Vec two = op(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    const Vec one = op(two, _mm512_movehdup_ps(two));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_permutexvar_ps(order, one);
  }
  template <int R>
  static MINISGL_INLINE Vec sums(const Vec (&a)[R]) {
    return fold<R>(a, add);
  }
  template <int R>
  static MINISGL_INLINE Vec largests(const Vec (&a)[R]) {
    return fold<R>(a, max);
  }

  // The same 16 bytes of each of 4 rows, `step` rows apart.
  template <class T>
  static MINISGL_INLINE __m512i four(const T* const* rows, int64_t step, int64_t column) {
    const auto at = [=](int64_t i) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i * step] + column));
    };
    __m512i z = _mm512_castsi128_si512(at(0));
    z = _mm512_inserti32x4(z, at(1), 1);
    z = _mm512_inserti32x4(z, at(2), 2);
    return _mm512_inserti32x4(z, at(3), 3);
  }
  // Eight columns of 32 rows: out[i * 64 + r] = rows[r][column + i].
  static MINISGL_INLINE void turn(const uint16_t* const* rows, int64_t column, uint16_t* out) {
    __m512i z[8], y[8];
    for (int r = 0; r < 8; ++r) z[r] = four(rows + r, 8, column);
    for (int r = 0; r < 4; ++r) {
      y[r] = _mm512_unpacklo_epi16(z[r], z[r + 4]);
      y[r + 4] = _mm512_unpackhi_epi16(z[r], z[r + 4]);
    }
    for (int r = 0; r < 8; r += 4) {
      for (int i = 0; i < 2; ++i) {
        z[r + i] = _mm512_unpacklo_epi16(y[r + i], y[r + i + 2]);
        z[r + i + 2] = _mm512_unpackhi_epi16(y[r + i], y[r + i + 2]);
      }
    }
    for (int r = 0; r < 8; r += 2) {
      _mm512_storeu_si512(out + r * kKeyBlock, _mm512_unpacklo_epi16(z[r], z[r + 1]));
      _mm512_storeu_si512(out + (r + 1) * kKeyBlock, _mm512_unpackhi_epi16(z[r], z[r + 1]));
    }
  }
  // Four columns, of 32 bits, of 16 rows.
  template <class T>
  static MINISGL_INLINE void turn(const T* const* rows, int64_t column, T* out) {
    static_assert(sizeof(T) == 4, "floats or pairs");
    __m512 z[4];
    for (int r = 0; r < 4; ++r) z[r] = _mm512_castsi512_ps(four(rows + r, 4, column));
    const __m512 a = _mm512_unpacklo_ps(z[0], z[1]), b = _mm512_unpackhi_ps(z[0], z[1]);
    const __m512 c = _mm512_unpacklo_ps(z[2], z[3]), e = _mm512_unpackhi_ps(z[2], z[3]);
    _mm512_storeu_ps(out, _mm512_shuffle_ps(a, c, 0x44));
    _mm512_storeu_ps(out + kKeyBlock, _mm512_shuffle_ps(a, c, 0xee));
    _mm512_storeu_ps(out + 2 * kKeyBlock, _mm512_shuffle_ps(b, e, 0x44));
    _mm512_storeu_ps(out + 3 * kKeyBlock, _mm512_shuffle_ps(b, e, 0xee));
  }
};

}  // namespace

const AttentionKernels& attention_kernels_avx512() { return attention_table<Avx512>(); }

}  // namespace minisgl
#endif
