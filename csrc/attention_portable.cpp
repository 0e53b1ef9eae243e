// The same kernels in plain C++: the reference for the others, and what runs where none of them
// can. __builtin_fmaf rounds once, as the vector instructions do.
#include "attention_table.h"
#include "half.h"

namespace minisgl {
namespace {

struct Portable {
  static constexpr int kRows = 2, kSums = 2;
  static constexpr bool kDirect = false;
  static constexpr bool kScales = false;
  static constexpr int64_t kTurned = 16;  // bytes of keys, one column, turned at once
  struct Vec {
    float lane[kVecLanes];
  };
  struct Ints {  // sums; lanes that nobody asked for may overflow
    uint32_t lane[kVecLanes];
  };
  struct Pairs {  // 16 of them, or one 16 times
    Pair lane[kVecLanes];
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
  static Vec div(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
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
  static void store_float16(uint16_t* p, const Vec& a) {
    for (int i = 0; i < kVecLanes; ++i) p[i] = float_to_half(a.lane[i]);
  }

  static Ints zero_ints() { return Ints{}; }
  static Vec to_floats(const Ints& a) {
    return each([&](int i) { return static_cast<float>(static_cast<int32_t>(a.lane[i])); });
  }
  static Pairs load_pairs(const Pair* p) {
    Pairs a;
    std::memcpy(a.lane, p, sizeof(a.lane));
    return a;
  }
  static void store_pairs(Pair* p, const Pairs& a) { std::memcpy(p, a.lane, sizeof(a.lane)); }
  static Pairs broadcast_pair(const Pair* p) {
    Pairs a;
    for (auto& lane : a.lane) lane = *p;
    return a;
  }
  // Both products of each lane, added to its sum.
  static Ints dot(const Pairs& a, const Pairs& b, Ints sum) {
    for (int i = 0; i < kVecLanes; ++i) {
      const Pair x = a.lane[i], y = b.lane[i];
      sum.lane[i] += static_cast<uint32_t>(x.first * y.first);
      sum.lane[i] += static_cast<uint32_t>(x.second * y.second);
    }
    return sum;
  }
  static void store_codes(int16_t* p, const Vec& a) {  // the low halves of the lanes
    for (int i = 0; i < kVecLanes; ++i) p[i] = static_cast<int16_t>(float_bits(a.lane[i]));
  }
  // The low halves of the lanes side by side.
  static Pairs join_codes(const Vec& first, const Vec& second) {
    Pairs a;
    for (int i = 0; i < kVecLanes; ++i) {
      a.lane[i] = {static_cast<int16_t>(float_bits(first.lane[i])),
                   static_cast<int16_t>(float_bits(second.lane[i]))};
    }
    return a;
  }
  // Pairs of 32 columns of two rows.
  static void interleave(const int16_t* a, const int16_t* b, Pairs (&out)[2]) {
    for (int i = 0; i < 2 * kVecLanes; ++i) out[i / kVecLanes].lane[i % kVecLanes] = {a[i], b[i]};
  }

  // 2^n where the low bits of `shifted` hold n + 127.
  static Vec power_of_two(const Vec& shifted) {
    return each([&](int i) {
      const uint32_t bits = float_bits(shifted.lane[i]) << 23;
      float x;
      std::memcpy(&x, &bits, 4);
      return x;
    });
  }
  // a where x < bound, b elsewhere.
  static Vec where_less(const Vec& x, const Vec& bound, const Vec& a, const Vec& b) {
    return each([&](int i) { return x.lane[i] < bound.lane[i] ? a.lane[i] : b.lane[i]; });
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

  template <int R>
  static MINISGL_INLINE Vec sums(const Vec (&a)[R]) {
    return one_by_one<Vec, R>(a, [](Vec x) { return sum(x); }, load);
  }
  template <int R>
  static MINISGL_INLINE Vec largests(const Vec (&a)[R]) {
    return one_by_one<Vec, R>(a, [](Vec x) { return largest(x); }, load);
  }

  // 16 bytes of as many rows as columns: out[i * 64 + r] = rows[r][column + i].
  template <class T>
  static void turn(const T* const* rows, int64_t column, T* out) {
    constexpr int kCount = 16 / sizeof(T);
    for (int r = 0; r < kCount; ++r) {
      for (int i = 0; i < kCount; ++i) out[i * kKeyBlock + r] = rows[r][column + i];
    }
  }
};

}  // namespace

const AttentionKernels& attention_kernels_portable() { return attention_table<Portable>(); }

}  // namespace minisgl
