// Half precision to and from float in plain C++, bit-exact, for code that runs on any machine.
#pragma once

#include <cstdint>
#include <cstring>

namespace minisgl {
namespace {

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = half >> 10 & 31u, fraction = half & 0x3ffu;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | fraction << 13;
  } else if (exponent != 0) {
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  } else {
    // A subnormal is its fraction times 2^-24; both factors and the product are exact.
    const float value = static_cast<float>(fraction) * 5.9604644775390625e-08f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// Rounds to nearest, ties to even; overflows to infinity.
inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits >= 0x7f800000u) return sign | (bits > 0x7f800000u ? 0x7e00u : 0x7c00u);
  if (bits >= 0x477ff000u) return sign | 0x7c00u;  // rounds past 65504
  if (bits < 0x38800000u) {
    // Below 2^-14: adding 0.5 aligns the last bit of the sum with 2^-24, the last bit of a half.
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return sign | static_cast<uint16_t>(bits - 0x3f000000u);
  }
  bits += 0xfffu + (bits >> 13 & 1u);
  return sign | static_cast<uint16_t>((bits - 0x38000000u) >> 13);
}

}  // namespace
}  // namespace minisgl
