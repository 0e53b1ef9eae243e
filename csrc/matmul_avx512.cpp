// AVX-512 with VNNI: a register holds 16 rows by 4 columns, one instruction multiplies it by 4
// broadcast activations.
#if defined(__x86_64__)
#include <immintrin.h>

#include "matmul_body.h"
#include "matmul_avx512_pipeline.h"
#include "matmul_float_body.h"

namespace minisgl {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16;
  static constexpr int kUnitsFew = 1;   // panels at once for one or two tokens
  static constexpr int kUnitsMany = 2;  // and for more
  static constexpr int kTokens = 5;     // tokens in flight
  template <int kBits>
  static constexpr bool kNeedsCorrection = true;
  using Int = __m512i;
  using Float = __m512;

  static MINISGL_INLINE Int load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static MINISGL_INLINE Int load(const int32_t* p) { return _mm512_load_si512(p); }
  static MINISGL_INLINE void store(int32_t* p, Int a) { _mm512_store_si512(p, a); }
  // 16 bits of each lane, the upper half of a lane is 0.
  static MINISGL_INLINE Int load_low16(const uint8_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  // Products of 16-bit halves: rounded and shifted down by 15 bits; added up in pairs to `sum`.
  static MINISGL_INLINE Int scale16(Int a, Int b) { return _mm512_mulhrs_epi16(a, b); }
  static MINISGL_INLINE Int dot16(Int sum, Int a, Int b) { return _mm512_dpwssd_epi32(sum, a, b); }
  static MINISGL_INLINE Int zero() { return _mm512_setzero_si512(); }
  static MINISGL_INLINE Int broadcast(const int32_t* p) { return _mm512_set1_epi32(*p); }
  template <int kBits>
  static MINISGL_INLINE Int shift_right(Int a) {
    return _mm512_srai_epi32(a, kBits);
  }
  static MINISGL_INLINE Int prepare8(Int codes) { return codes; }
  static MINISGL_INLINE Int low_nibbles(Int a) {
    return _mm512_and_si512(a, _mm512_set1_epi8(15));
  }
  static MINISGL_INLINE Int high_nibbles(Int a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }

  // a | (b shifted left by kShift & kMask), byte by byte.
  template <int kShift, int kMask>
  static MINISGL_INLINE Int or_bits(Int a, Int b) {
    if constexpr (kShift > 0) b = _mm512_slli_epi16(b, kShift);
    if constexpr (kShift < 0) b = _mm512_srli_epi16(b, -kShift);
    return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi8(kMask), 0xf8);
  }

  static MINISGL_INLINE Float load_half(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static MINISGL_INLINE Float broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static MINISGL_INLINE Float zero_float() { return _mm512_setzero_ps(); }
  static MINISGL_INLINE Float load_float(const float* p) { return _mm512_loadu_ps(p); }
  static MINISGL_INLINE void store(float* p, Float a) { _mm512_storeu_ps(p, a); }
  static MINISGL_INLINE Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static MINISGL_INLINE Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static MINISGL_INLINE Float to_float(Int a) { return _mm512_cvtepi32_ps(a); }

  // sum += codes times four activations, which the instruction itself broadcasts: a core that shares
  // its front end with another thread has room for few instructions. The compiler would load what
  // two sub-blocks share once, in an instruction of its own.
  static MINISGL_INLINE void dot4(Int& sum, Int codes, const int8_t* four) {
    typedef int32_t __attribute__((may_alias)) Four;
    __asm__("vpdpbusd %2%{1to16%}, %1, %0"
            : "+v"(sum)
            : "v"(codes), "m"(*reinterpret_cast<const Four*>(four)));
  }

  // Four vectors of two sub-blocks times several tokens, in one piece: left to the compiler, the sums
  // wander from register to register.
#define MINISGL_DOT(v, u)                                                     \
  "vpdpbusd 32*" #u "+4*" #v "(%[x])%{1to16%}, %[a" #v "], %[s0" #u "]\n\t" \
  "vpdpbusd 32*" #u "+4*" #v "(%[x])%{1to16%}, %[b" #v "], %[s1" #u "]\n\t"
#define MINISGL_SUM(u) [s0##u] "+v"(sum[0][u]), [s1##u] "+v"(sum[1][u])
#define MINISGL_DOT_PAIR(kTokens, DOTS, ...)                                                     \
  static MINISGL_INLINE void dot_pair(const Int* a, const Int* b, const int8_t* x,               \
                                      Int(&sum)[2][kTokens]) {                                   \
    __asm__(DOTS(0) DOTS(1) DOTS(2) DOTS(3)                                                      \
            : __VA_ARGS__                                                                        \
            : [a0] "v"(a[0]), [a1] "v"(a[1]), [a2] "v"(a[2]), [a3] "v"(a[3]), [b0] "v"(b[0]),    \
              [b1] "v"(b[1]), [b2] "v"(b[2]), [b3] "v"(b[3]), [x] "r"(x),                        \
              "m"(*reinterpret_cast<const int8_t(*)[kTokens * kGroup]>(x)));                     \
  }
#define MINISGL_DOT_4(v) MINISGL_DOT(v, 0) MINISGL_DOT(v, 1) MINISGL_DOT(v, 2) MINISGL_DOT(v, 3)
#define MINISGL_DOT_5(v) MINISGL_DOT_4(v) MINISGL_DOT(v, 4)
  MINISGL_DOT_PAIR(4, MINISGL_DOT_4, MINISGL_SUM(0), MINISGL_SUM(1), MINISGL_SUM(2),
                   MINISGL_SUM(3))
  MINISGL_DOT_PAIR(5, MINISGL_DOT_5, MINISGL_SUM(0), MINISGL_SUM(1), MINISGL_SUM(2),
                   MINISGL_SUM(3), MINISGL_SUM(4))

  template <int kBits, int kCount, int P, int U, class B>
  static MINISGL_INLINE void dot(const B (&block)[P], int first, const int8_t* x,
                                 Int (&sum)[P][U]) {
    if constexpr (P == 2 && U >= 4) {  // one for kTokens, one for its shorter steps
      for (int v = first; v < first + kCount; v += 4) {
        dot_pair(block[0].code + v, block[1].code + v, x + 4 * v, sum);
      }
      return;
    }
#pragma GCC unroll 8
    for (int v = first; v < first + kCount; ++v) {
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) {
        for (int p = 0; p < P; ++p) dot4(sum[p][u], block[p].code[v], x + u * kGroup + v * 4);
      }
    }
  }
};

// Two panels times a tile of tokens, group by group (matmul_avx512_pipeline.h).
template <class T>
void run_pipeline(const PanelTask& task, int64_t first) {
  using V = Avx512;
  constexpr bool kFloats = !T::kHasUnit;
  static_assert(kFloats ? T::kBits == 8 && !T::kHasMin && T::kShift == 0 : T::kBits == 4);
  const Units<V, 2> units(task, first);
  const ActivationTile& x = task.x;
  PipelineSums sums;
  alignas(64) float unit[2 * kPanelRows];
  typename V::Int scale[2];  // where they do not lie in the block as they are needed
  GroupStep step;
  step.sums = &sums;
  step.weight_unit = unit;
  step.out = task.out + units.row[0];
  step.out_stride = task.out_stride * static_cast<int64_t>(sizeof(float));
  step.tokens = x.stride;
  if constexpr (T::kHasUnit) {
    for (int p = 0; p < 2; ++p) V::store(unit + p * kPanelRows, units.template unit<T>(task, p));
  }
  const int64_t asked = tokens_per_group(task);
  for (int64_t g = 0; g < task.groups; ++g) {
    const int64_t offset = g * T::kInfo.block_bytes(), at = g * x.stride;
    prefetch_blocks<V, T, 2>(task, units, offset);
    prefetch_output<V, 2>(task, units, g, asked);
    for (int p = 0; p < 2; ++p) {
      step.codes[p] = units.panel[p] + offset;
      const uint8_t* scales = step.codes[p] + T::kInfo.code_bytes();
      if constexpr (kFloats) scale[p] = _mm512_castps_si512(V::load_half(scales));
      if constexpr (!kFloats && !T::kHasMin) scale[p] = V::load_low16(scales);
      step.scales[p] = T::kHasMin ? static_cast<const void*>(scales) : scale + p;
    }
    step.x = x.codes + at * kGroup;
    step.start = (kFloats ? x.minus_sum[T::kSum] : x.start) + at;
    step.factor = kFloats ? static_cast<const void*>(x.scale + at) : x.factor + at;
    step.unit = x.unit + g / kSpan * x.stride;
    const bool is_end = g == task.groups - 1, is_first = g < (kFloats ? 1 : kSpan);
    group_fn<kFloats>(g % kSpan == 0, g % kSpan == kSpan - 1 || is_end, is_first, is_end)(step);
  }
}

template <Format kFormat>
void run_panels_pipelined(const PanelTask& task) {
  int64_t first = 0;
  if (task.x.stride >= kPipelineTokens) {
    for (; (first + 2) * kPanelRows <= task.rows; first += 2) {
      run_pipeline<Traits<kFormat>>(task, first);
    }
    if (first == task.panels) return;
  }
  PanelTask rest = task;
  rest.weight += first * task.panel_bytes;
  rest.panels -= first;
  rest.rows -= first * kPanelRows;
  rest.out += first * kPanelRows;
  run_panels<Avx512, kFormat>(rest);
}

struct FloatAvx512 {
  static constexpr int kRows = 4, kTokens = 6;
  using Vec = __m512;

  static MINISGL_INLINE Vec zero() { return _mm512_setzero_ps(); }
  static MINISGL_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static MINISGL_INLINE Vec load_bfloat16(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static MINISGL_INLINE Vec load_float16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static MINISGL_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

  // Lane i with i + 8, then i + 4, i + 2, i + 1.
  static MINISGL_INLINE float sum(Vec a) {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
};

}  // namespace

const MatmulKernels& matmul_kernels_avx512() {
  static const MatmulKernels kernels = [] {
    MatmulKernels k{};
    fill_packed<Avx512>(&k);
    k.packed[static_cast<int>(Format::kQ4)] = run_panels_pipelined<Format::kQ4>;
    k.packed[static_cast<int>(Format::kQ4m)] = run_panels_pipelined<Format::kQ4m>;
    k.packed[static_cast<int>(Format::kQ8)] = run_panels_pipelined<Format::kQ8>;
    fill_float<FloatAvx512>(&k);
    return k;
  }();
  return kernels;
}

}  // namespace minisgl
#endif
