// Queries as rows of a tile, side by side, as floats or as codes; part of attention_body.h.
#pragma once

#include "attention_load_body.h"

namespace minisgl {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr int64_t kMostQuery = 8191;
// A query, or weights of a block, below are nothing: what makes codes of them would be infinite.
constexpr float kLeast = 1e-34f;

MINISGL_INLINE int16_t* query_codes(const Scratch& s, int64_t row) {
  return reinterpret_cast<int16_t*>(s.queries) + row * s.pad;
}

// For V::kDirect: each 16 codes of a query twice, where otherwise turned keys lie.
MINISGL_INLINE int16_t* twice(const Scratch& s, int64_t row) {
  return reinterpret_cast<int16_t*>(s.turned) + row * 2 * s.pad;
}

inline void repeat_queries(const Scratch& s, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    const int16_t* from = query_codes(s, row);
    int16_t* to = twice(s, row);
    for (int64_t d = 0; d < s.pad; d += kVecLanes) {
      std::memcpy(to + 2 * d, from + d, kVecLanes * sizeof(int16_t));
      std::memcpy(to + 2 * d + kVecLanes, from + d, kVecLanes * sizeof(int16_t));
    }
  }
}

// Row `row` of the tile, padded by zeros in `loose` if need be; a query further on is fetched.
template <class V>
MINISGL_INLINE const float* query_row(const AttentionTask& task, int64_t row, int64_t group,
                                      int64_t pad, float* loose) {
  constexpr int64_t kAhead = 4;  // queries; the next one is a stride away
  const int64_t dim = task.shape->head_dim;
  const int64_t query = task.num_queries == 1 ? 0 : row / group;  // one waits for no division
  const float* q = task.q + query * task.q_stride + (row - query * group) * dim;
  if (query + kAhead < task.num_queries) {
    prefetch_bytes(q + kAhead * task.q_stride, dim * static_cast<int64_t>(sizeof(float)));
  }
  if (dim == pad) return q;
  widen_row<V, KvKind::kFloat32>(q, dim, loose);
  return loose;
}

// R queries times the scale, from row `first` on, as codes in [-most, most] and their units. A NaN
// or an infinity gives a NaN unit.
template <class V, int R = V::kRows>
void code_queries(const AttentionTask& task, const Scratch& s, int64_t first, float most) {
  const int64_t rows = task.num_rows(), group = task.group(), pad = s.pad;
  const auto zero = V::zero(), least = V::broadcast(kLeast), limit = V::broadcast(most);
  const auto scale = V::broadcast(task.shape->scale * kLog2E);
  alignas(64) float factor[kVecLanes];
  for (; first + R <= rows; first += R) {
    typename V::Vec each[R], wrong[R];
    const float* x[R];
    for (int r = 0; r < R; ++r) {
      x[r] = query_row<V>(task, first + r, group, pad, s.total.out + r * pad);
      each[r] = wrong[r] = zero;
      for (int64_t d = 0; d < pad; d += kVecLanes) {
        const auto value = V::mul(V::load(x[r] + d), scale);
        each[r] = V::max(V::max(value, V::sub(zero, value)), each[r]);
        wrong[r] = V::fma(value, zero, wrong[r]);
      }
    }
    const auto largest = V::template largests<R>(each), nan = V::template sums<R>(wrong);
    V::store(factor, V::where_less(least, largest, V::div(limit, largest), zero));
    // Of nothing but zeros any scale will do but 0, which scores of -infinity would not survive.
    const auto unit = V::where_less(least, largest, V::div(largest, limit), V::broadcast(1.0f));
    V::store(s.q_scale + first, V::add(unit, nan));
    for (int r = 0; r < R; ++r) {
      const auto by = V::broadcast(factor[r]), round = V::broadcast(kRound);
      int16_t* to = query_codes(s, first + r);
      for (int64_t d = 0; d < pad; d += kVecLanes) {
        V::store_codes(to + d, V::fma(V::mul(V::load(x[r] + d), scale), by, round));
      }
    }
  }
  if constexpr (R > 1) {
    if (first < rows) code_queries<V, R - 1>(task, s, first, most);
  }
}

// The largest code of a query: no sum of products with keys overflows.
inline float most_of_query(int64_t pad, KvKind kind) {
  return static_cast<float>(min64(kMostQuery, 0x7fffffff / (pad * largest_code(kind))));
}

// All queries times the scale, as floats or codes.
template <class V, KvKind kKind>
void load_queries(const AttentionTask& task, const Scratch& s) {
  if constexpr (has_scales(kKind)) {
    code_queries<V>(task, s, 0, most_of_query(s.pad, kKind));
    return;
  }
  const int64_t rows = task.num_rows(), group = task.group();
  const auto scale = V::broadcast(task.shape->scale * kLog2E);
  for (int64_t row = 0; row < rows; ++row) {
    float* out = s.queries + row * s.pad;
    const float* q = query_row<V>(task, row, group, s.pad, out);
    for (int64_t d = 0; d < s.pad; d += kVecLanes) {
      V::store(out + d, V::mul(V::load(q + d), scale));
    }
  }
}

}  // namespace
}  // namespace minisgl
