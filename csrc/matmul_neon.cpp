// NEON with the dot product extension: a register holds 4 rows by 4 columns.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "matmul_body.h"
#include "matmul_float_body.h"

namespace minisgl {
namespace {

struct Neon {
  static constexpr int kLanes = 4;
  static constexpr int kUnitsFew = 2;
  static constexpr int kUnitsMany = 2;
  static constexpr int kTokens = 4;
  // The dot product is signed by signed: codes below 8 bits are used as they are, 8-bit codes are
  // made signed, which leaves nothing to correct.
  template <int kBits>
  static constexpr bool kNeedsCorrection = kBits != 8;
  using Int = int32x4_t;
  using Float = float32x4_t;

  static MINISGL_INLINE Int load(const uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
  static MINISGL_INLINE Int load(const int32_t* p) { return vld1q_s32(p); }
  static MINISGL_INLINE void store(int32_t* p, Int a) { vst1q_s32(p, a); }
  static MINISGL_INLINE Int load_low16(const uint8_t* p) {
    return vreinterpretq_s32_u32(vmovl_u16(vreinterpret_u16_u8(vld1_u8(p))));
  }
  static MINISGL_INLINE Int scale16(Int a, Int b) {
    return vreinterpretq_s32_s16(vqrdmulhq_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
  }
  static MINISGL_INLINE Int dot16(Int sum, Int a, Int b) {
    const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
    return vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(x, y)));
  }
  static MINISGL_INLINE Int zero() { return vdupq_n_s32(0); }
  static MINISGL_INLINE Int broadcast(const int32_t* p) { return vld1q_dup_s32(p); }
  template <int kBits>
  static MINISGL_INLINE Int shift_right(Int a) {
    return vshrq_n_s32(a, kBits);
  }
  static MINISGL_INLINE Int prepare8(Int codes) {
    return vreinterpretq_s32_u8(veorq_u8(vreinterpretq_u8_s32(codes), vdupq_n_u8(0x80)));
  }
  static MINISGL_INLINE Int low_nibbles(Int a) {
    return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(a), vdupq_n_u8(15)));
  }
  static MINISGL_INLINE Int high_nibbles(Int a) {
    return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(a), 4));
  }
  template <int kShift, int kMask>
  static MINISGL_INLINE Int or_bits(Int a, Int b) {
    uint8x16_t bits = vreinterpretq_u8_s32(b);
    if constexpr (kShift > 0) bits = vshlq_n_u8(bits, kShift);
    if constexpr (kShift < 0) bits = vshrq_n_u8(bits, -kShift);
    bits = vandq_u8(bits, vdupq_n_u8(kMask));
    return vreinterpretq_s32_u8(vorrq_u8(vreinterpretq_u8_s32(a), bits));
  }
  static MINISGL_INLINE Float load_half(const uint8_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
  }
  static MINISGL_INLINE Float broadcast(const float* p) { return vld1q_dup_f32(p); }
  static MINISGL_INLINE Float zero_float() { return vdupq_n_f32(0); }
  static MINISGL_INLINE Float load_float(const float* p) { return vld1q_f32(p); }
  static MINISGL_INLINE void store(float* p, Float a) { vst1q_f32(p, a); }
  static MINISGL_INLINE Float mul(Float a, Float b) { return vmulq_f32(a, b); }
  static MINISGL_INLINE Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  static MINISGL_INLINE Float to_float(Int a) { return vcvtq_f32_s32(a); }

  template <int kBits, int kCount, int P, int U, class B>
  static MINISGL_INLINE void dot(const B (&block)[P], int first, const int8_t* x,
                                 Int (&sum)[P][U]) {
#pragma GCC unroll 8
    for (int v = first; v < first + kCount; ++v) {
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) {
        int32_t four;
        __builtin_memcpy(&four, x + u * kGroup + v * 4, 4);
        const int8x16_t columns = vreinterpretq_s8_s32(vdupq_n_s32(four));
        for (int p = 0; p < P; ++p) {
          sum[p][u] = vdotq_s32(sum[p][u], vreinterpretq_s8_s32(block[p].code[v]), columns);
        }
      }
    }
  }
};

struct FloatNeon {
  static constexpr int kRows = 2, kTokens = 2;
  struct Vec {
    float32x4_t part[4];
  };

  static MINISGL_INLINE Vec zero() {
    Vec a;
    for (auto& part : a.part) part = vdupq_n_f32(0);
    return a;
  }
  static MINISGL_INLINE Vec load(const float* p) {
    Vec a;
    for (int i = 0; i < 4; ++i) a.part[i] = vld1q_f32(p + 4 * i);
    return a;
  }
  static MINISGL_INLINE Vec load_bfloat16(const uint16_t* p) {
    Vec a;
    for (int i = 0; i < 4; ++i) {
      a.part[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
    }
    return a;
  }
  static MINISGL_INLINE Vec load_float16(const uint16_t* p) {
    Vec a;
    for (int i = 0; i < 4; ++i) {
      a.part[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
    }
    return a;
  }
  static MINISGL_INLINE Vec fma(Vec a, Vec b, Vec c) {
    for (int i = 0; i < 4; ++i) c.part[i] = vfmaq_f32(c.part[i], a.part[i], b.part[i]);
    return c;
  }
  static MINISGL_INLINE float sum(Vec a) {
    const float32x4_t low = vaddq_f32(a.part[0], a.part[2]);
    const float32x4_t high = vaddq_f32(a.part[1], a.part[3]);
    const float32x4_t four = vaddq_f32(low, high);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }
};

}  // namespace

const MatmulKernels& matmul_kernels_neon() {
  static const MatmulKernels kernels = [] {
    MatmulKernels k{};
    fill_packed<Neon>(&k);
    fill_float<FloatNeon>(&k);
    return k;
  }();
  return kernels;
}

}  // namespace minisgl
#endif
