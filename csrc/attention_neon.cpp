// NEON: a vector of 16 floats is four registers.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "attention_table.h"

namespace minisgl {
namespace {

struct Neon {
  static constexpr int kRows = 6, kSums = 6;  // 24 sums in registers
  static constexpr bool kDirect = false;
  static constexpr bool kScales = false;
  static constexpr int64_t kTurned = 16;  // bytes of keys, one column, turned at once
  struct Vec {
    float32x4_t part[4];
  };
  struct Ints {  // 16 sums
    int32x4_t part[4];
  };
  struct Pairs {  // the first of 8 pairs and their second, twice
    int16x8x2_t part[2];
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
  static MINISGL_INLINE Vec div(Vec a, Vec b) {
    return each([=](int i) { return vdivq_f32(a.part[i], b.part[i]); });
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
  static MINISGL_INLINE void store_float16(uint16_t* p, Vec a) {
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.part[i])));
  }

  static MINISGL_INLINE Ints zero_ints() {
    const int32x4_t zero = vdupq_n_s32(0);
    return {{zero, zero, zero, zero}};
  }
  static MINISGL_INLINE Vec to_floats(Ints a) {
    return each([=](int i) { return vcvtq_f32_s32(a.part[i]); });
  }
  static MINISGL_INLINE Pairs load_pairs(const Pair* p) {
    return {{vld2q_s16(&p->first), vld2q_s16(&p[8].first)}};
  }
  static MINISGL_INLINE void store_pairs(Pair* p, Pairs a) {
    vst2q_s16(&p->first, a.part[0]);
    vst2q_s16(&p[8].first, a.part[1]);
  }
  static MINISGL_INLINE Pair broadcast_pair(const Pair* p) { return *p; }
  // Both products of each lane, added to its sum.
  static MINISGL_INLINE Ints dot(Pair a, Pairs b, Ints sum) {
    for (int i = 0; i < 2; ++i) {
      const int16x8_t first = b.part[i].val[0], second = b.part[i].val[1];
      int32x4_t &low = sum.part[2 * i], &high = sum.part[2 * i + 1];
      low = vmlal_n_s16(low, vget_low_s16(first), a.first);
      high = vmlal_n_s16(high, vget_high_s16(first), a.first);
      low = vmlal_n_s16(low, vget_low_s16(second), a.second);
      high = vmlal_n_s16(high, vget_high_s16(second), a.second);
    }
    return sum;
  }
  static MINISGL_INLINE int16x8_t low(Vec x, int i) {  // halves of the lanes of two parts
    return vcombine_s16(vmovn_s32(vreinterpretq_s32_f32(x.part[i])),
                        vmovn_s32(vreinterpretq_s32_f32(x.part[i + 1])));
  }
  static MINISGL_INLINE void store_codes(int16_t* p, Vec a) {  // the low halves of the lanes
    vst1q_s16(p, low(a, 0));
    vst1q_s16(p + 8, low(a, 2));
  }
  // The low halves of the lanes side by side.
  static MINISGL_INLINE Pairs join_codes(Vec first, Vec second) {
    return {{{{low(first, 0), low(second, 0)}}, {{low(first, 2), low(second, 2)}}}};
  }
  // Pairs of 32 columns of two rows.
  static MINISGL_INLINE void interleave(const int16_t* a, const int16_t* b, Pairs (&out)[2]) {
    for (int i = 0; i < 4; ++i) {
      out[i / 2].part[i % 2] = {{vld1q_s16(a + 8 * i), vld1q_s16(b + 8 * i)}};
    }
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
  // Four columns, of 32 bits, of 4 rows.
  template <class T>
  static MINISGL_INLINE void turn(const T* const* rows, int64_t column, T* out) {
    static_assert(sizeof(T) == 4, "floats or pairs");
    const auto get = [=](int r) {
      return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(rows[r] + column)));
    };
    const auto put = [=](int c, float32x4_t x) {
      vst1q_u8(reinterpret_cast<uint8_t*>(out + c * kKeyBlock), vreinterpretq_u8_f32(x));
    };
    const float32x4x2_t ab = vtrnq_f32(get(0), get(1)), ce = vtrnq_f32(get(2), get(3));
    for (int i = 0; i < 2; ++i) {
      const float32x4_t x = ab.val[i], y = ce.val[i];
      put(i, vcombine_f32(vget_low_f32(x), vget_low_f32(y)));
      put(i + 2, vcombine_f32(vget_high_f32(x), vget_high_f32(y)));
    }
  }
};

}  // namespace

const AttentionKernels& attention_kernels_neon() { return attention_table<Neon>(); }

}  // namespace minisgl
#endif
