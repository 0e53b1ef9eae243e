// Norm, rotation and storing, written once; V is used only to narrow floats to half precision. All
// else is element by element in plain C, without fused operations, so it is the same everywhere.
#pragma once

#include "attention_element.h"

namespace minisgl {
namespace {

template <class V>
MINISGL_INLINE void narrow_float16(const float* x, int64_t dim, uint16_t* out) {
  int64_t d = 0;
  for (; d + kVecLanes <= dim; d += kVecLanes) V::store_float16(out + d, V::load(x + d));
  if (d == dim) return;
  float tail[kVecLanes] = {};
  uint16_t half[kVecLanes];
  std::memcpy(tail, x + d, static_cast<size_t>(dim - d) * sizeof(float));
  V::store_float16(half, V::load(tail));
  std::memcpy(out + d, half, static_cast<size_t>(dim - d) * sizeof(uint16_t));
}

// Rounds to nearest, ties to even; a NaN stays one.
MINISGL_INLINE void narrow_bfloat16(const float* __restrict x, int64_t dim,
                                    uint16_t* __restrict out) {
  for (int64_t d = 0; d < dim; ++d) {
    const uint32_t bits = float_bits(x[d]);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    out[d] = static_cast<uint16_t>(nan ? bits >> 16 | 0x40u : rounded);
  }
}

template <class V, KvKind kKind>
MINISGL_INLINE float narrow_row(const float* x, int64_t dim, typename Element<kKind>::Type* out) {
  if constexpr (kKind == KvKind::kFloat32) {
    std::memcpy(out, x, static_cast<size_t>(dim) * sizeof(float));
  }
  if constexpr (kKind == KvKind::kBfloat16) narrow_bfloat16(x, dim, out);
  if constexpr (kKind == KvKind::kFloat16) narrow_float16<V>(x, dim, out);
  if constexpr (has_scales(kKind)) {
    return narrow_codes(x, dim, static_cast<float>(largest_code(kKind)), out);
  }
  return 1.0f;
}

template <class V, KvKind kKind>
void store_head(const AttentionShape& shape, const KVStore& kv, int64_t location, int64_t head,
                const float* k, const float* v) {
  using T = typename Element<kKind>::Type;
  const int64_t at = location * kv.token_stride + head * shape.head_dim;
  const float k_scale = narrow_row<V, kKind>(k, shape.head_dim, static_cast<T*>(kv.k) + at);
  const float v_scale = narrow_row<V, kKind>(v, shape.head_dim, static_cast<T*>(kv.v) + at);
  if constexpr (has_scales(kKind)) {
    kv.k_scale[location * shape.num_kv_heads + head] = k_scale;
    kv.v_scale[location * shape.num_kv_heads + head] = v_scale;
  }
}

template <class V, KvKind kKind>
void store_tokens(const AttentionShape& shape, const KVStore& kv, const float* k, int64_t k_stride,
                  const float* v, int64_t v_stride, const int32_t* out_loc, int64_t tokens) {
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
      const int64_t at = h * shape.head_dim;
      store_head<V, kKind>(shape, kv, out_loc[t], h, k + t * k_stride + at, v + t * v_stride + at);
    }
  }
}

// x / rms(x) * weight; the sum of squares is 16 partial sums, added up as a tree.
MINISGL_INLINE void norm_head(const float* x, const float* weight, float eps, int64_t dim,
                              float* out) {
  float part[kVecLanes] = {};
  int64_t d = 0;
  for (; d + kVecLanes <= dim; d += kVecLanes) {
    for (int64_t i = 0; i < kVecLanes; ++i) part[i] += x[d + i] * x[d + i];
  }
  for (int64_t i = 0; d + i < dim; ++i) part[i] += x[d + i] * x[d + i];
  for (int64_t half = kVecLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) part[i] += part[i + half];
  }
  const float scale = 1.0f / __builtin_sqrtf(part[0] / static_cast<float>(dim) + eps);
  for (int64_t i = 0; i < dim; ++i) out[i] = x[i] * scale * weight[i];
}

MINISGL_INLINE void rotate_head(const float* __restrict cos, const float* __restrict sin,
                                int64_t half, float* __restrict x) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cos[i] - second * sin[i];
    x[i + half] = second * cos[i] + first * sin[i];
  }
}

template <class V, KvKind kKind>
void rope_tokens(const AttentionShape& shape, const KVStore& kv, const RopeStore& work) {
  const int64_t dim = shape.head_dim, num_q = shape.num_q_heads, num_kv = shape.num_kv_heads;
  float turned[kMaxHeadDim];
  for (int64_t t = 0; t < work.tokens; ++t) {
    float* row = work.qkv + t * work.stride;
    const int64_t table = (work.positions != nullptr ? work.positions[t] : t) * work.half;
    const float *cos = work.cos + table, *sin = work.sin + table;
    for (int64_t h = 0; h < num_q; ++h) {
      float* q = row + h * dim;
      if (work.q_norm != nullptr) norm_head(q, work.q_norm, work.eps, dim, q);
      rotate_head(cos, sin, work.half, q);
    }
    for (int64_t h = 0; h < num_kv; ++h) {
      const float* k = row + (num_q + h) * dim;
      if (work.k_norm != nullptr) {
        norm_head(k, work.k_norm, work.eps, dim, turned);
      } else {
        std::memcpy(turned, k, static_cast<size_t>(dim) * sizeof(float));
      }
      rotate_head(cos, sin, work.half, turned);
      store_head<V, kKind>(shape, kv, work.out_loc[t], h, turned, k + num_kv * dim);
    }
  }
}

}  // namespace
}  // namespace minisgl
