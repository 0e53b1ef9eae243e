// AVX2: a vector of 16 floats is two registers.
#if defined(__x86_64__)
#include <immintrin.h>

#include "attention_table.h"

namespace minisgl {
namespace {

struct Avx2 {
  static constexpr int kRows = 6, kSums = 6;
  static constexpr bool kDirect = false;
  static constexpr bool kScales = false;
  static constexpr int64_t kTurned = 32;  // bytes of keys, one column, turned at once
  struct Vec {
    __m256 low, high;
  };
  struct Ints {  // 16 sums
    __m256i low, high;
  };
  using Pairs = Ints;  // 16 of them, or one 16 times

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
  static MINISGL_INLINE Vec div(Vec a, Vec b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
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
  static MINISGL_INLINE void store_float16(uint16_t* p, Vec a) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.low, kNearest));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.high, kNearest));
  }

  static MINISGL_INLINE Ints zero_ints() {
    return {_mm256_setzero_si256(), _mm256_setzero_si256()};
  }
  static MINISGL_INLINE Vec to_floats(Ints a) {
    return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)};
  }
  static MINISGL_INLINE __m256i get(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  static MINISGL_INLINE void put(void* p, __m256i a) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), a);
  }
  static MINISGL_INLINE Pairs load_pairs(const Pair* p) { return {get(p), get(p + 8)}; }
  static MINISGL_INLINE void store_pairs(Pair* p, Pairs a) {
    put(p, a.low);
    put(p + 8, a.high);
  }
  static MINISGL_INLINE Pairs broadcast_pair(const Pair* p) {
    int32_t both;
    std::memcpy(&both, p, sizeof(both));
    const __m256i all = _mm256_set1_epi32(both);
    return {all, all};
  }
  // Both products of each lane, added to its sum.
  static MINISGL_INLINE Ints dot(Pairs a, Pairs b, Ints sum) {
    return {_mm256_add_epi32(sum.low, _mm256_madd_epi16(a.low, b.low)),
            _mm256_add_epi32(sum.high, _mm256_madd_epi16(a.high, b.high))};
  }
  static MINISGL_INLINE void store_codes(int16_t* p, Vec a) {  // the low halves of the lanes
    const __m256i low = _mm256_srai_epi32(_mm256_slli_epi32(_mm256_castps_si256(a.low), 16), 16);
    const __m256i high = _mm256_srai_epi32(_mm256_slli_epi32(_mm256_castps_si256(a.high), 16), 16);
    put(p, _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
  }
  static MINISGL_INLINE __m256i join(__m256 first, __m256 second) {
    const __m256i high = _mm256_slli_epi32(_mm256_castps_si256(second), 16);
    return _mm256_blend_epi16(_mm256_castps_si256(first), high, 0xaa);
  }
  // The low halves of the lanes side by side.
  static MINISGL_INLINE Pairs join_codes(Vec first, Vec second) {
    return {join(first.low, second.low), join(first.high, second.high)};
  }
  // Pairs of 32 columns of two rows.
  static MINISGL_INLINE void interleave(const int16_t* a, const int16_t* b, Pairs (&out)[2]) {
    for (int i = 0; i < 2; ++i) {
      const __m256i x = _mm256_permute4x64_epi64(get(a + 16 * i), 0xd8);
      const __m256i y = _mm256_permute4x64_epi64(get(b + 16 * i), 0xd8);
      out[i] = {_mm256_unpacklo_epi16(x, y), _mm256_unpackhi_epi16(x, y)};
    }
  }

  // 2^n where the low bits of `shifted` hold n + 127.
  static MINISGL_INLINE __m256 power(__m256 shifted) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23));
  }
  static MINISGL_INLINE Vec power_of_two(Vec shifted) {
    return {power(shifted.low), power(shifted.high)};
  }
  // a where x < bound, b elsewhere.
  static MINISGL_INLINE Vec where_less(Vec x, Vec bound, Vec a, Vec b) {
    return {_mm256_blendv_ps(b.low, a.low, _mm256_cmp_ps(x.low, bound.low, _CMP_LT_OQ)),
            _mm256_blendv_ps(b.high, a.high, _mm256_cmp_ps(x.high, bound.high, _CMP_LT_OQ))};
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

  template <int R>
  static MINISGL_INLINE Vec sums(const Vec (&a)[R]) {
    return one_by_one<Vec, R>(a, [](Vec x) { return sum(x); }, load);
  }
  template <int R>
  static MINISGL_INLINE Vec largests(const Vec (&a)[R]) {
    return one_by_one<Vec, R>(a, [](Vec x) { return largest(x); }, load);
  }

  // The same 16 bytes of each of 2 rows, `step` rows apart.
  template <class T>
  static MINISGL_INLINE __m256i two(const T* const* rows, int64_t step, int64_t column) {
    return _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(rows[step] + column),
                               reinterpret_cast<const __m128i*>(rows[0] + column));
  }
  // Eight columns of 16 rows: out[i * 64 + r] = rows[r][column + i].
  static MINISGL_INLINE void turn(const uint16_t* const* rows, int64_t column, uint16_t* out) {
    __m256i z[8], y[8];
    for (int r = 0; r < 8; ++r) z[r] = two(rows + r, 8, column);
    for (int r = 0; r < 4; ++r) {
      y[r] = _mm256_unpacklo_epi16(z[r], z[r + 4]);
      y[r + 4] = _mm256_unpackhi_epi16(z[r], z[r + 4]);
    }
    for (int r = 0; r < 8; r += 4) {
      for (int i = 0; i < 2; ++i) {
        z[r + i] = _mm256_unpacklo_epi16(y[r + i], y[r + i + 2]);
        z[r + i + 2] = _mm256_unpackhi_epi16(y[r + i], y[r + i + 2]);
      }
    }
    for (int r = 0; r < 8; r += 2) {
      put(out + r * kKeyBlock, _mm256_unpacklo_epi16(z[r], z[r + 1]));
      put(out + (r + 1) * kKeyBlock, _mm256_unpackhi_epi16(z[r], z[r + 1]));
    }
  }
  // Four columns, of 32 bits, of 8 rows.
  template <class T>
  static MINISGL_INLINE void turn(const T* const* rows, int64_t column, T* out) {
    static_assert(sizeof(T) == 4, "floats or pairs");
    __m256 z[4];
    for (int r = 0; r < 4; ++r) z[r] = _mm256_castsi256_ps(two(rows + r, 4, column));
    const __m256 a = _mm256_unpacklo_ps(z[0], z[1]), b = _mm256_unpackhi_ps(z[0], z[1]);
    const __m256 c = _mm256_unpacklo_ps(z[2], z[3]), e = _mm256_unpackhi_ps(z[2], z[3]);
    put(out, _mm256_castps_si256(_mm256_shuffle_ps(a, c, 0x44)));
    put(out + kKeyBlock, _mm256_castps_si256(_mm256_shuffle_ps(a, c, 0xee)));
    put(out + 2 * kKeyBlock, _mm256_castps_si256(_mm256_shuffle_ps(b, e, 0x44)));
    put(out + 3 * kKeyBlock, _mm256_castps_si256(_mm256_shuffle_ps(b, e, 0xee)));
  }
};

}  // namespace

const AttentionKernels& attention_kernels_avx2() { return attention_table<Avx2>(); }

}  // namespace minisgl
#endif
