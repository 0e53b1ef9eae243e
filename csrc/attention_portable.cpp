// The same kernels in plain C++: the reference for the others, and what runs where none of them
// can. __builtin_fmaf rounds once, as the vector instructions do.
#include "attention_table.h"
#include "half.h"

namespace minisgl {
namespace {

struct Portable {
  static constexpr int kRows = 2, kVecs = 1;
  struct Vec {
    float lane[kVecLanes];
  };

  template <class Fn>
  static MINISGL_INLINE Vec each(Fn fn) {
    Vec a;
    for (int i = 0; i < kVecLanes; ++i) a.lane[i] = fn(i);
    return a;
  }
  static Vec zero() { return Vec{}; }
  static Vec load(const float* p) {
    Vec a;
    std::memcpy(a.lane, p, sizeof(a.lane));
    return a;
  }
  static void store(float* p, const Vec& a) { std::memcpy(p, a.lane, sizeof(a.lane)); }
  static Vec broadcast(float x) {
    return each([=](int) { return x; });
  }
  static Vec add(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static Vec sub(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static Vec mul(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    return each([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
  }
  static Vec max(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static float first(const Vec& a) { return a.lane[0]; }

  static Vec load_bfloat16(const uint16_t* p) {
    return each([&](int i) {
      const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
      float x;
      std::memcpy(&x, &bits, 4);
      return x;
    });
  }
  static Vec load_float16(const uint16_t* p) {
    return each([&](int i) { return half_to_float(p[i]); });
  }
  static Vec load_int8(const int8_t* p) {
    return each([&](int i) { return static_cast<float>(p[i]); });
  }
  static void store_float16(uint16_t* p, const Vec& a) {
    for (int i = 0; i < kVecLanes; ++i) p[i] = float_to_half(a.lane[i]);
  }

  // 2^n where the low bits of `shifted` hold n + 2^22.
  static Vec power_of_two(const Vec& shifted) {
    return each([&](int i) {
      const uint32_t bits = (float_bits(shifted.lane[i]) + 127u) << 23;
      float x;
      std::memcpy(&x, &bits, 4);
      return x;
    });
  }
  static Vec zero_where_less(const Vec& x, const Vec& bound, const Vec& a) {
    return each([&](int i) { return x.lane[i] < bound.lane[i] ? 0.0f : a.lane[i]; });
  }

  // Lane i with i + 8, then i + 4, i + 2, i + 1.
  static float sum(Vec a) {
    for (int half = kVecLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) a.lane[i] += a.lane[i + half];
    }
    return a.lane[0];
  }
  static float largest(Vec a) {
    for (int half = kVecLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) {
        a.lane[i] = a.lane[i] > a.lane[i + half] ? a.lane[i] : a.lane[i + half];
      }
    }
    return a.lane[0];
  }

  // Four columns of 16 rows: out[i * out_stride + r] = rows[r * stride + i].
  static void transpose4(const float* rows, int64_t stride, float* out, int64_t out_stride) {
    for (int r = 0; r < kVecLanes; ++r) {
      for (int i = 0; i < 4; ++i) out[i * out_stride + r] = rows[r * stride + i];
    }
  }
};

}  // namespace

const AttentionKernels& attention_kernels_portable() { return attention_table<Portable>(); }

}  // namespace minisgl
