// The same product in plain C++, for machines without any of the other instruction sets and as
// the reference for them. std::fma rounds once, as the vector instructions do.
#include <cmath>

#include "half.h"
#include "matmul_body.h"
#include "matmul_float_body.h"

namespace minisgl {
namespace {

struct Portable {
  static constexpr int kLanes = 4;
  static constexpr int kUnitsFew = 1;
  static constexpr int kUnitsMany = 1;
  static constexpr int kTokens = 2;
  template <int kBits>
  static constexpr bool kNeedsCorrection = true;
  struct Int {
    union {
      uint8_t byte[16];
      int32_t word[4];
    };
  };
  struct Float {
    float lane[4];
  };

  static Int load(const uint8_t* p) {
    Int a;
    std::memcpy(a.byte, p, 16);
    return a;
  }
  static Int load(const int32_t* p) {
    Int a;
    std::memcpy(a.word, p, 16);
    return a;
  }
  static void store(int32_t* p, Int a) { std::memcpy(p, a.word, 16); }
  static Int load_low16(const uint8_t* p) {
    Int a;
    for (int i = 0; i < 4; ++i) {
      uint16_t low;
      std::memcpy(&low, p + 2 * i, 2);
      a.word[i] = low;
    }
    return a;
  }
  // As registers add: what lies behind a tile may overflow, and nobody looks at it.
  static int32_t add(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
  }
  static int low16(int32_t a) { return static_cast<int16_t>(a & 0xffff); }
  static int high16(int32_t a) { return a >> 16; }
  static Int scale16(Int a, Int b) {
    const auto product = [](int x, int y) { return (x * y + (1 << 14)) >> 15; };
    for (int i = 0; i < 4; ++i) {
      const int low = product(low16(a.word[i]), low16(b.word[i]));
      const int high = product(high16(a.word[i]), high16(b.word[i]));
      a.word[i] = static_cast<int32_t>(static_cast<uint32_t>(high) << 16 | (low & 0xffff));
    }
    return a;
  }
  static Int dot16(Int sum, Int a, Int b) {
    for (int i = 0; i < 4; ++i) {
      sum.word[i] = add(sum.word[i], low16(a.word[i]) * low16(b.word[i]));
      sum.word[i] = add(sum.word[i], high16(a.word[i]) * high16(b.word[i]));
    }
    return sum;
  }
  static Int zero() { return Int{}; }
  static Int broadcast(const int32_t* p) {
    Int a;
    for (int i = 0; i < 4; ++i) a.word[i] = *p;
    return a;
  }
  template <int kBits>
  static Int shift_right(Int a) {
    for (int i = 0; i < 4; ++i) a.word[i] >>= kBits;
    return a;
  }
  static Int prepare8(Int codes) { return codes; }
  static Int low_nibbles(Int a) {
    for (int i = 0; i < 16; ++i) a.byte[i] &= 15;
    return a;
  }
  static Int high_nibbles(Int a) {
    for (int i = 0; i < 16; ++i) a.byte[i] >>= 4;
    return a;
  }
  template <int kShift, int kMask>
  static Int or_bits(Int a, Int b) {
    for (int i = 0; i < 16; ++i) {
      const int shifted = kShift > 0 ? b.byte[i] << (kShift > 0 ? kShift : 0)
                                     : b.byte[i] >> (kShift < 0 ? -kShift : 0);
      a.byte[i] = static_cast<uint8_t>(a.byte[i] | (shifted & kMask));
    }
    return a;
  }
  static Float load_half(const uint8_t* p) {
    Float a;
    for (int i = 0; i < 4; ++i) {
      uint16_t half;
      std::memcpy(&half, p + 2 * i, 2);
      a.lane[i] = half_to_float(half);
    }
    return a;
  }
  static Float broadcast(const float* p) { return {{*p, *p, *p, *p}}; }
  static Float zero_float() { return {{0, 0, 0, 0}}; }
  static Float load_float(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static void store(float* p, Float a) { std::memcpy(p, a.lane, 16); }
  static Float mul(Float a, Float b) {
    for (int i = 0; i < 4; ++i) a.lane[i] *= b.lane[i];
    return a;
  }
  static Float fma(Float a, Float b, Float c) {
    for (int i = 0; i < 4; ++i) c.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
    return c;
  }
  static Float to_float(Int a) {
    Float b;
    for (int i = 0; i < 4; ++i) b.lane[i] = static_cast<float>(a.word[i]);
    return b;
  }

  template <int kBits, int kCount, int P, int U, class B>
  static void dot(const B (&block)[P], int first, const int8_t* x, Int (&sum)[P][U]) {
    for (int u = 0; u < U; ++u) {
      for (int p = 0; p < P; ++p) {
        for (int v = first; v < first + kCount; ++v) {
          const int8_t* four = x + u * kGroup + v * 4;
          const uint8_t* code = block[p].code[v].byte;
          for (int i = 0; i < 16; ++i) {
            int32_t& word = sum[p][u].word[i / 4];
            word = add(word, code[i] * four[i % 4]);
          }
        }
      }
    }
  }
};

struct FloatPortable {
  static constexpr int kRows = 1, kTokens = 3;
  struct Vec {
    float lane[kLanes16];
  };

  static Vec zero() { return Vec{}; }
  static Vec load(const float* p) {
    Vec a;
    std::memcpy(a.lane, p, sizeof(a.lane));
    return a;
  }
  static Vec load_bfloat16(const uint16_t* p) {
    Vec a;
    for (int i = 0; i < kLanes16; ++i) {
      const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
      std::memcpy(&a.lane[i], &bits, 4);
    }
    return a;
  }
  static Vec load_float16(const uint16_t* p) {
    Vec a;
    for (int i = 0; i < kLanes16; ++i) a.lane[i] = half_to_float(p[i]);
    return a;
  }
  static Vec fma(Vec a, Vec b, Vec c) {
    for (int i = 0; i < kLanes16; ++i) c.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
    return c;
  }
  static float sum(Vec a) {
    for (int half = kLanes16 / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) a.lane[i] += a.lane[i + half];
    }
    return a.lane[0];
  }
};

}  // namespace

const MatmulKernels& matmul_kernels_portable() {
  static const MatmulKernels kernels = [] {
    MatmulKernels k{};
    fill_packed<Portable>(&k);
    fill_float<FloatPortable>(&k);
    return k;
  }();
  return kernels;
}

}  // namespace minisgl
