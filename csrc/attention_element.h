// Elements of the KV pool, and numbers as codes; part of attention_body.h and
// attention_rope_body.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention_kernels.h"

namespace minisgl {
namespace {

template <KvKind kKind>
struct Element {
  using Type = uint16_t;
};
template <>
struct Element<KvKind::kFloat32> {
  using Type = float;
};
template <>
struct Element<KvKind::kInt8> {
  using Type = int8_t;
};
template <>
struct Element<KvKind::kInt16> {
  using Type = int16_t;
};

// Two codes whose products are added: one lane of a vector.
struct Pair {
  int16_t first, second;
};

inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t clamp(int64_t x, int64_t low, int64_t high) { return max64(low, min64(x, high)); }

// 16 elements as floats.
template <class V, KvKind kKind>
MINISGL_INLINE typename V::Vec load_element(const typename Element<kKind>::Type* p) {
  if constexpr (kKind == KvKind::kFloat32) return V::load(p);
  if constexpr (kKind == KvKind::kBfloat16) return V::load_bfloat16(p);
  if constexpr (kKind == KvKind::kFloat16) return V::load_float16(p);
}

// A vector whose lane r is what `fold` makes of vector r.
template <class Vec, int R, class Fold, class Load>
MINISGL_INLINE Vec one_by_one(const Vec (&a)[R], Fold fold, Load load) {
  float lanes[kVecLanes] = {};
  for (int r = 0; r < R; ++r) lanes[r] = fold(a[r]);
  return load(lanes);
}

// A row of any length as floats, padded by zeros to whole vectors.
template <class V, KvKind kKind>
MINISGL_INLINE void widen_row(const typename Element<kKind>::Type* row, int64_t dim, float* out) {
  using T = typename Element<kKind>::Type;
  int64_t d = 0;
  for (; d + kVecLanes <= dim; d += kVecLanes) {
    V::store(out + d, load_element<V, kKind>(row + d));
  }
  if (d == dim) return;
  T tail[kVecLanes] = {};
  std::memcpy(tail, row + d, static_cast<size_t>(dim - d) * sizeof(T));
  V::store(out + d, load_element<V, kKind>(tail));
}

MINISGL_INLINE uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: added, the low bits are the rounded code

// Codes in [-most_code, most_code], rounded to nearest, and their scale. A NaN or an infinity gives
// codes of 0 and a NaN scale: it spoils its own token, visibly.
template <class T>
MINISGL_INLINE float narrow_codes(const float* __restrict x, int64_t dim, float most_code,
                                  T* __restrict out) {
  uint32_t most = 0;  // magnitudes order like their bits
  for (int64_t d = 0; d < dim; ++d) {
    const uint32_t magnitude = float_bits(x[d]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  float largest;
  std::memcpy(&largest, &most, 4);
  const bool finite = most < 0x7f800000u;
  // Below this, most_code / largest would overflow; such a head is nothing.
  const float factor = finite && largest > most_code * 1e-38f ? most_code / largest : 0.0f;
  for (int64_t d = 0; d < dim; ++d) {
    const float shifted = (finite ? x[d] : 0.0f) * factor + kRound;
    out[d] = static_cast<T>(float_bits(shifted));
  }
  return finite ? (factor > 0.0f ? largest / most_code : 0.0f) : __builtin_nanf("");
}

}  // namespace
}  // namespace minisgl
