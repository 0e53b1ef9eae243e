// The attention kernels, written once over a vector class V of 16 float lanes; attention_<isa>.cpp
// supplies V. Everything is in an unnamed namespace: code compiled for one instruction set must
// never be merged by the linker with that of another.
//
// For each block of 64 keys: the keys are laid on their side (column by column, 64 keys each), so
// that a score is a chain over the columns in some lane; rows go through in groups that share each
// loaded key and value. Grouping decides who shares loads, never the order of a sum.
#pragma once

#include <cstring>

#include "attention_element.h"

namespace minisgl {
namespace {

constexpr int64_t kKeyVecs = kKeyBlock / kVecLanes;

// One block of keys as a task sees it. Positions inside the block are counted from its first key.
template <KvKind kKind>
struct KeyBlock {
  using T = typename Element<kKind>::Type;
  int64_t base;          // absolute position of the block's first key
  int64_t begin, end;    // what the tile sees of it
  const T* values[kKeyBlock];
  const float* packed[kKeyBlock];
};

// Working memory of a task, cut from AttentionTask::scratch.
struct Scratch {
  float *keys, *values, *loose, *scores, *k_scale, *v_scale;
  float *split_out, *total_out, *split_max, *split_sum, *total_max, *total_sum;
  int64_t pad;

  explicit Scratch(const AttentionTask& task) {
    const int64_t rows = task.num_rows();
    pad = padded_dim(task.shape->head_dim);
    float* next = task.scratch;
    const auto take = [&](int64_t count) {
      float* result = next;
      next += count;
      return result;
    };
    keys = take(pad * kKeyBlock);
    values = take(pad * kKeyBlock);
    loose = take(pad * kVecLanes);
    scores = take(kMaxRows * kKeyBlock);
    k_scale = take(kKeyBlock);
    v_scale = take(kKeyBlock);
    split_out = take(rows * pad);
    total_out = take(rows * pad);
    split_max = take(rows);
    split_sum = take(rows);
    total_max = take(rows);
    total_sum = take(rows);
  }
};

// 2^x for x <= 0, and exactly 0 below 2^-126; NaN stays NaN. The polynomial is a minimax fit of 2^x
// on [-1/2, 1/2] with the constant fixed at 1, relative error 2e-9.
template <class V>
MINISGL_INLINE typename V::Vec exp2_vec(typename V::Vec x) {
  const auto c = [](float value) { return V::broadcast(value); };
  const auto clamped = V::max(c(-126.0f), x);  // in this order: a NaN passes
  const auto shifted = V::add(clamped, c(12582912.0f));  // 1.5 * 2^23: the integer in the low bits
  const auto r = V::sub(clamped, V::sub(shifted, c(12582912.0f)));
  auto p = c(0x1.41fbbcp-13f);
  p = V::fma(p, r, c(0x1.5f3e54p-10f));
  p = V::fma(p, r, c(0x1.3b2d4cp-7f));
  p = V::fma(p, r, c(0x1.c6aee8p-5f));
  p = V::fma(p, r, c(0x1.ebfbdcp-3f));
  p = V::fma(p, r, c(0x1.62e430p-1f));
  p = V::fma(p, r, c(1.0f));
  return V::zero_where_less(x, c(-126.0f), V::mul(p, V::power_of_two(shifted)));
}

template <class V>
MINISGL_INLINE float exp2_one(float x) {
  return V::first(exp2_vec<V>(V::broadcast(x)));
}

inline float larger(float a, float b) { return a > b ? a : b; }

// Lays keys [g * 16, g * 16 + 16) of the block on their side: keys[column * 64 + key].
template <class V, KvKind kKind>
MINISGL_INLINE void turn_keys(const typename Element<kKind>::Type* const* rows, int64_t dim,
                              const Scratch& s, int64_t g) {
  for (int64_t i = 0; i < kVecLanes; ++i) {
    float* loose = s.loose + i * s.pad;
    if (rows[i] != nullptr) {
      widen_row<V, kKind>(rows[i], dim, loose);
    } else {
      std::memset(loose, 0, static_cast<size_t>(s.pad) * sizeof(float));
    }
  }
  float* keys = s.keys + g * kVecLanes;
  for (int64_t d = 0; d < dim; d += 4, keys += 4 * kKeyBlock) {
    V::transpose4(s.loose + d, s.pad, keys, kKeyBlock);
  }
}

template <class T>
MINISGL_INLINE void prefetch_row(const T* row, int64_t dim) {
  const char* p = reinterpret_cast<const char*>(row);
  const int64_t bytes = dim * static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

// Reads the block's keys, and remembers where its values are or widens them.
template <class V, KvKind kKind>
void load_block(const AttentionTask& task, const Scratch& s, bool pack_values,
                KeyBlock<kKind>* block) {
  using T = typename Element<kKind>::Type;
  const KVView& kv = *task.kv;
  const int64_t dim = task.shape->head_dim, heads = task.shape->num_kv_heads;
  const T* k = static_cast<const T*>(kv.k) + task.kv_head * dim;
  const T* v = static_cast<const T*>(kv.v) + task.kv_head * dim;
  const int32_t* locations = task.locations + block->base;
  const T* rows[kKeyBlock] = {};
  for (int64_t j = block->begin; j < block->end; ++j) {
    const int64_t location = locations[j];
    rows[j] = k + location * kv.token_stride;
    block->values[j] = v + location * kv.token_stride;
    if constexpr (kKind == KvKind::kInt8) {
      s.k_scale[j] = kv.k_scale[location * heads + task.kv_head];
      s.v_scale[j] = kv.v_scale[location * heads + task.kv_head];
    }
    prefetch_row(block->values[j], dim);
  }
  const int64_t last = (block->end + kVecLanes - 1) / kVecLanes;
  for (int64_t g = block->begin / kVecLanes; g < last; ++g) {
    turn_keys<V, kKind>(rows + g * kVecLanes, dim, s, g);
  }
  if (!pack_values) return;
  for (int64_t j = block->begin; j < block->end; ++j) {
    widen_row<V, kKind>(block->values[j], dim, s.values + j * s.pad);
    block->packed[j] = s.values + j * s.pad;
  }
}

// scores[row][key] for R rows and N vectors of keys from vector g on.
template <class V, KvKind kKind, int R, int N>
MINISGL_INLINE void score_tile(const Scratch& s, const float* const* q, int64_t dim, int64_t g,
                               float scale) {
  typename V::Vec acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) acc[r][n] = V::zero();
  }
  const float* keys = s.keys + g * kVecLanes;
  for (int64_t d = 0; d < dim; ++d, keys += kKeyBlock) {
    typename V::Vec key[N];
    for (int n = 0; n < N; ++n) key[n] = V::load(keys + n * kVecLanes);
    for (int r = 0; r < R; ++r) {
      const auto query = V::broadcast(q[r][d]);
      for (int n = 0; n < N; ++n) acc[r][n] = V::fma(query, key[n], acc[r][n]);
    }
  }
  for (int n = 0; n < N; ++n) {
    const int64_t at = (g + n) * kVecLanes;
    for (int r = 0; r < R; ++r) {
      auto score = acc[r][n];
      if constexpr (kKind == KvKind::kInt8) score = V::mul(score, V::load(s.k_scale + at));
      V::store(s.scores + r * kKeyBlock + at, V::mul(score, V::broadcast(scale)));
    }
  }
}

template <class V, KvKind kKind, int R>
void score_rows(const Scratch& s, const float* const* q, int64_t dim, int64_t begin, int64_t end,
                float scale) {
  int64_t g = begin / kVecLanes;
  const int64_t last = (end + kVecLanes - 1) / kVecLanes;
  for (; g + V::kVecs <= last; g += V::kVecs) {
    score_tile<V, kKind, R, V::kVecs>(s, q, dim, g, scale);
  }
  for (; g < last; ++g) score_tile<V, kKind, R, 1>(s, q, dim, g, scale);
}

// out[row] += sum over keys [begin, end) of weight[row][key] * value[key], N vectors of columns.
template <class V, KvKind kKind, int R, int N>
MINISGL_INLINE void value_tile(const typename Element<kKind>::Type* const* values,
                               const float* const* weight, int64_t begin, int64_t end,
                               int64_t column, float* const* out) {
  typename V::Vec acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) acc[r][n] = V::load(out[r] + column + n * kVecLanes);
  }
  for (int64_t j = begin; j < end; ++j) {
    typename V::Vec value[N];
    for (int n = 0; n < N; ++n) {
      value[n] = load_element<V, kKind>(values[j] + column + n * kVecLanes);
    }
    for (int r = 0; r < R; ++r) {
      const auto w = V::broadcast(weight[r][j]);
      for (int n = 0; n < N; ++n) acc[r][n] = V::fma(w, value[n], acc[r][n]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) V::store(out[r] + column + n * kVecLanes, acc[r][n]);
  }
}

template <class V, KvKind kKind, int R>
void value_rows(const typename Element<kKind>::Type* const* values, const float* const* weight,
                int64_t begin, int64_t end, int64_t pad, float* const* out) {
  if (begin >= end) return;
  int64_t column = 0;
  for (; column + V::kVecs * kVecLanes <= pad; column += V::kVecs * kVecLanes) {
    value_tile<V, kKind, R, V::kVecs>(values, weight, begin, end, column, out);
  }
  for (; column < pad; column += kVecLanes) {
    value_tile<V, kKind, R, 1>(values, weight, begin, end, column, out);
  }
}

// Scores of one row become weights; keys outside [begin, end) get none. Updates maximum and sum,
// and scales what the split has gathered so far.
template <class V, KvKind kKind>
MINISGL_INLINE void softmax_row(const Scratch& s, float* scores, int64_t row, int64_t begin,
                                int64_t end) {
  constexpr float kNone = -__builtin_inff();
  for (int64_t j = 0; j < begin; ++j) scores[j] = kNone;
  for (int64_t j = end; j < kKeyBlock; ++j) scores[j] = kNone;
  typename V::Vec x[kKeyVecs];
  for (int g = 0; g < kKeyVecs; ++g) x[g] = V::load(scores + g * kVecLanes);
  const auto most = V::max(V::max(x[0], x[1]), V::max(x[2], x[3]));
  const float before = s.split_max[row], now = larger(V::largest(most), before);
  typename V::Vec sum = V::zero();
  for (int g = 0; g < kKeyVecs; ++g) {
    auto weight = exp2_vec<V>(V::sub(x[g], V::broadcast(now)));
    sum = V::add(sum, weight);
    if constexpr (kKind == KvKind::kInt8) {
      weight = V::mul(weight, V::load(s.v_scale + g * kVecLanes));
    }
    V::store(scores + g * kVecLanes, weight);
  }
  s.split_max[row] = now;
  // A factor of 1 is left out: it changes no bit.
  const float factor = now == before ? 1.0f : exp2_one<V>(before - now);
  s.split_sum[row] = __builtin_fmaf(s.split_sum[row], factor, V::sum(sum));
  if (factor == 1.0f) return;
  float* out = s.split_out + row * s.pad;
  for (int64_t c = 0; c < s.pad; c += kVecLanes) {
    V::store(out + c, V::mul(V::load(out + c), V::broadcast(factor)));
  }
}

// R rows from row `first` on, through one block.
template <class V, KvKind kKind, KvKind kValueKind, int R>
void block_rows(const AttentionTask& task, const Scratch& s, const KeyBlock<kKind>& block,
                const typename Element<kValueKind>::Type* const* values, int64_t first,
                float scale) {
  const int64_t dim = task.shape->head_dim, group = task.group();
  const float *q[R], *weight[R];
  float* out[R];
  int64_t begin[R], end[R];
  int64_t low = kKeyBlock, high = 0, shared_low = 0, shared_high = kKeyBlock;
  for (int r = 0; r < R; ++r) {
    const int64_t row = first + r, position = task.row_position(row);
    q[r] = task.q + row / group * task.q_stride + row % group * dim;
    weight[r] = s.scores + r * kKeyBlock;
    out[r] = s.split_out + row * s.pad;
    begin[r] = clamp(task.low(position) - block.base, 0, kKeyBlock);
    end[r] = clamp(position + 1 - block.base, 0, kKeyBlock);
    low = min64(low, begin[r]);
    high = max64(high, end[r]);
    shared_low = max64(shared_low, begin[r]);
    shared_high = min64(shared_high, end[r]);
  }
  if (low >= high) return;
  score_rows<V, kKind, R>(s, q, dim, low, high, scale);
  for (int r = 0; r < R; ++r) {
    if (begin[r] >= end[r]) continue;
    softmax_row<V, kKind>(s, s.scores + r * kKeyBlock, first + r, begin[r], end[r]);
  }
  if (shared_low >= shared_high) {
    for (int r = 0; r < R; ++r) {
      value_rows<V, kValueKind, 1>(values, weight + r, begin[r], end[r], s.pad, out + r);
    }
    return;
  }
  for (int r = 0; r < R; ++r) {
    value_rows<V, kValueKind, 1>(values, weight + r, begin[r], shared_low, s.pad, out + r);
  }
  value_rows<V, kValueKind, R>(values, weight, shared_low, shared_high, s.pad, out);
  for (int r = 0; r < R; ++r) {
    value_rows<V, kValueKind, 1>(values, weight + r, shared_high, end[r], s.pad, out + r);
  }
}

// All rows of the tile, in groups of V::kRows and a smaller last one.
template <class V, KvKind kKind, KvKind kValueKind, int R = V::kRows>
void block_all_rows(const AttentionTask& task, const Scratch& s, const KeyBlock<kKind>& block,
                    const typename Element<kValueKind>::Type* const* values, int64_t first,
                    float scale) {
  const int64_t rows = task.num_rows();
  for (; first + R <= rows; first += R) {
    block_rows<V, kKind, kValueKind, R>(task, s, block, values, first, scale);
  }
  if constexpr (R > 1) {
    block_all_rows<V, kKind, kValueKind, R - 1>(task, s, block, values, first, scale);
  }
}

}  // namespace
}  // namespace minisgl
