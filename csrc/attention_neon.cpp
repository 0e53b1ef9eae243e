// NEON: a vector of 16 floats is four registers.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "attention_table.h"

namespace minisgl {
namespace {

struct Neon {
  static constexpr int kRows = 6, kSums = 6;  // 24 sums in registers
  static constexpr int64_t kTurned = 16;  // bytes of keys, one column, turned at once
  struct Vec {
    float32x4_t part[4];
  };

  template <class Fn>
  static MINISGL_INLINE Vec each(Fn fn) {
    return {{fn(0), fn(1), fn(2), fn(3)}};
  }
  static MINISGL_INLINE Vec zero() { return broadcast(0.0f); }
  static MINISGL_INLINE Vec load(const float* p) {
    return each([=](int i) { return vld1q_f32(p + 4 * i); });
  }
  static MINISGL_INLINE void store(float* p, Vec a) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.part[i]);
  }
  static MINISGL_INLINE Vec broadcast(float x) {
    return each([=](int) { return vdupq_n_f32(x); });
  }
  static MINISGL_INLINE Vec add(Vec a, Vec b) {
    return each([=](int i) { return vaddq_f32(a.part[i], b.part[i]); });
  }
  static MINISGL_INLINE Vec sub(Vec a, Vec b) {
    return each([=](int i) { return vsubq_f32(a.part[i], b.part[i]); });
  }
  static MINISGL_INLINE Vec mul(Vec a, Vec b) {
    return each([=](int i) { return vmulq_f32(a.part[i], b.part[i]); });
  }
  static MINISGL_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return each([=](int i) { return vfmaq_f32(c.part[i], a.part[i], b.part[i]); });
  }
  static MINISGL_INLINE float32x4_t larger4(float32x4_t a, float32x4_t b) {  // a > b ? a : b
    return vbslq_f32(vcgtq_f32(a, b), a, b);
  }
  static MINISGL_INLINE Vec max(Vec a, Vec b) {
    return each([=](int i) { return larger4(a.part[i], b.part[i]); });
  }
  static MINISGL_INLINE float first(Vec a) { return vgetq_lane_f32(a.part[0], 0); }

  static MINISGL_INLINE Vec load_bfloat16(const uint16_t* p) {
    return each(
        [=](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
  }
  static MINISGL_INLINE Vec load_float16(const uint16_t* p) {
    return each(
        [=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
  }
  static MINISGL_INLINE Vec load_int8(const int8_t* p) {
    const int8x16_t codes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_s8(vget_high_s8(codes));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
             vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
  }
  static MINISGL_INLINE Vec load_int16(const uint16_t* p) {
    return each([=](int i) {
      return vcvtq_f32_s32(vmovl_s16(vreinterpret_s16_u16(vld1_u16(p + 4 * i))));
    });
  }
  static MINISGL_INLINE void store_float16(uint16_t* p, Vec a) {
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.part[i])));
  }

  // 2^n where the low bits of `shifted` hold n + 127.
  static MINISGL_INLINE Vec power_of_two(Vec shifted) {
    return each([=](int i) {
      return vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(shifted.part[i]), 23));
    });
  }
  // a where x < bound, b elsewhere.
  static MINISGL_INLINE Vec where_less(Vec x, Vec bound, Vec a, Vec b) {
    return each([=](int i) {
      return vbslq_f32(vcltq_f32(x.part[i], bound.part[i]), a.part[i], b.part[i]);
    });
  }

  // Lane i with i + 8, then i + 4, i + 2, i + 1.
  static MINISGL_INLINE float sum(Vec a) {
    const float32x4_t low = vaddq_f32(a.part[0], a.part[2]);
    const float32x4_t high = vaddq_f32(a.part[1], a.part[3]);
    const float32x4_t four = vaddq_f32(low, high);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }
  static MINISGL_INLINE float largest(Vec a) {
    const float32x4_t low = larger4(a.part[0], a.part[2]), high = larger4(a.part[1], a.part[3]);
    const float32x4_t four = larger4(low, high);
    float lane[4];
    vst1q_f32(lane, four);
    const float even = lane[0] > lane[2] ? lane[0] : lane[2];
    const float odd = lane[1] > lane[3] ? lane[1] : lane[3];
    return even > odd ? even : odd;
  }

  template <int R>
  static MINISGL_INLINE Vec sums(const Vec (&a)[R]) {
    return one_by_one<Vec, R>(a, [](Vec x) { return sum(x); }, load);
  }
  template <int R>
  static MINISGL_INLINE Vec largests(const Vec (&a)[R]) {
    return one_by_one<Vec, R>(a, [](Vec x) { return largest(x); }, load);
  }

  // Eight columns of 8 rows: out[i * 64 + r] = rows[r][column + i].
  static MINISGL_INLINE void turn(const uint16_t* const* rows, int64_t column, uint16_t* out) {
    uint16x8_t z[8], y[8];
    for (int r = 0; r < 8; ++r) z[r] = vld1q_u16(rows[r] + column);
    for (int r = 0; r < 4; ++r) {
      y[r] = vzip1q_u16(z[r], z[r + 4]);
      y[r + 4] = vzip2q_u16(z[r], z[r + 4]);
    }
    for (int r = 0; r < 8; r += 4) {
      for (int i = 0; i < 2; ++i) {
        z[r + i] = vzip1q_u16(y[r + i], y[r + i + 2]);
        z[r + i + 2] = vzip2q_u16(y[r + i], y[r + i + 2]);
      }
    }
    for (int r = 0; r < 8; r += 2) {
      vst1q_u16(out + r * kKeyBlock, vzip1q_u16(z[r], z[r + 1]));
      vst1q_u16(out + (r + 1) * kKeyBlock, vzip2q_u16(z[r], z[r + 1]));
    }
  }
  // Four columns of 4 rows.
  static MINISGL_INLINE void turn(const float* const* rows, int64_t column, float* out) {
    const float32x4x2_t ab = vtrnq_f32(vld1q_f32(rows[0] + column), vld1q_f32(rows[1] + column));
    const float32x4x2_t ce = vtrnq_f32(vld1q_f32(rows[2] + column), vld1q_f32(rows[3] + column));
    for (int i = 0; i < 2; ++i) {
      const float32x4_t x = ab.val[i], y = ce.val[i];
      vst1q_f32(out + i * kKeyBlock, vcombine_f32(vget_low_f32(x), vget_low_f32(y)));
      vst1q_f32(out + (i + 2) * kKeyBlock, vcombine_f32(vget_high_f32(x), vget_high_f32(y)));
    }
  }
};

}  // namespace

const AttentionKernels& attention_kernels_neon() { return attention_table<Neon>(); }

}  // namespace minisgl
#endif
