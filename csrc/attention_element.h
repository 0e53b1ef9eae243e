// Elements of the KV pool as floats; part of attention_body.h and attention_rope_body.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention_kernels.h"

namespace minisgl {
namespace {

// Turned: what keys are while they lie on their side; codes have been widened to 16 bits.
template <KvKind kKind>
struct Element {
  using Type = uint16_t;
  using Turned = uint16_t;
};
template <>
struct Element<KvKind::kFloat32> {
  using Type = float;
  using Turned = float;
};
template <>
struct Element<KvKind::kInt8> {
  using Type = int8_t;
  using Turned = uint16_t;
};

inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t clamp(int64_t x, int64_t low, int64_t high) { return max64(low, min64(x, high)); }

// 16 elements as floats; int8 codes come without their scale.
template <class V, KvKind kKind>
MINISGL_INLINE typename V::Vec load_element(const typename Element<kKind>::Type* p) {
  if constexpr (kKind == KvKind::kFloat32) return V::load(p);
  if constexpr (kKind == KvKind::kBfloat16) return V::load_bfloat16(p);
  if constexpr (kKind == KvKind::kFloat16) return V::load_float16(p);
  if constexpr (kKind == KvKind::kInt8) return V::load_int8(p);
}

// 16 keys of one column of a turned block as floats.
template <class V, KvKind kKind>
MINISGL_INLINE typename V::Vec load_turned(const typename Element<kKind>::Turned* p) {
  if constexpr (kKind == KvKind::kFloat32) return V::load(p);
  if constexpr (kKind == KvKind::kBfloat16) return V::load_bfloat16(p);
  if constexpr (kKind == KvKind::kFloat16) return V::load_float16(p);
  if constexpr (kKind == KvKind::kInt8) return V::load_int16(p);
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

}  // namespace
}  // namespace minisgl
