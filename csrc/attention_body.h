// The attention kernels, written once over a vector class V of 16 float lanes; attention_<isa>.cpp
// supplies V. Everything is in an unnamed namespace: code compiled for one instruction set must
// never be merged by the linker with that of another.
//
// For each block of 64 keys: the keys are laid on their side (column by column, 64 keys each), so
// that a score is a chain over the columns in some lane; rows go through in groups that share each
// loaded key and value. Few rows widen 16-bit keys and values as they read them, many rows find
// them widened once. Grouping decides who shares loads, never the order of a sum.
#pragma once

#include <cstring>

#include "attention_element.h"

namespace minisgl {
namespace {

constexpr int64_t kKeyVecs = kKeyBlock / kVecLanes;
constexpr float kNone = -__builtin_inff();  // the maximum of nothing

alignas(64) constexpr float kIota[kKeyBlock] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

// What rows have gathered: padded columns of `out` for each, its maximum and its sum.
struct RowState {
  float *out, *max, *sum;
};

// One block of keys as a task sees it. Positions inside the block are counted from its first key.
// kStored: what keys and values are when rows read them, floats if they lie widened in scratch;
// kScaled: they are codes, or were. All kinds share what is compiled for widened ones.
template <KvKind kStored, bool kScaled>
struct KeyBlock {
  int64_t base;        // absolute position of the block's first key
  int64_t begin, end;  // what the tile sees of it
  bool full;           // every row sees every key
  const typename Element<kStored>::Turned* keys;
  const typename Element<kStored>::Type* values[kKeyBlock];
};

template <KvKind kKind, bool kPacked>
using KeyBlockOf = KeyBlock<kPacked ? KvKind::kFloat32 : kKind, kKind == KvKind::kInt8>;

// Working memory of a task, cut from AttentionTask::scratch.
struct Scratch {
  float *queries, *turned, *keys, *values, *scores, *k_scale, *v_scale;
  RowState split, total;
  int32_t* position;  // of each row
  int64_t pad;

  explicit Scratch(const AttentionTask& task) {
    const int64_t rows = task.num_rows(), whole = (rows + kVecLanes - 1) / kVecLanes * kVecLanes;
    pad = padded_dim(task.shape->head_dim);
    float* next = task.scratch;
    const auto take = [&](int64_t count) {
      float* result = next;
      next += count;
      return result;
    };
    queries = take(rows * pad);
    turned = take(pad * kKeyBlock);
    keys = take(pad * kKeyBlock);
    values = take(pad * kKeyBlock);
    scores = take(kMaxRows * kKeyBlock);
    k_scale = take(kKeyBlock);
    v_scale = take(kKeyBlock);
    for (RowState* state : {&split, &total}) {
      state->out = take(rows * pad);
      state->max = take(whole + kVecLanes);
      state->sum = take(whole + kVecLanes);
    }
    position = reinterpret_cast<int32_t*>(take(whole));
  }
};

inline float larger(float a, float b) { return a > b ? a : b; }

// 2^x for x <= 0, and exactly 0 below -126; NaN stays NaN. The polynomial is a minimax fit of 2^x
// on [-1/2, 1/2] with the constant fixed at 1, relative error 2e-9.
template <class V>
MINISGL_INLINE typename V::Vec exp2_vec(typename V::Vec x) {
  const auto c = [](float value) { return V::broadcast(value); };
  // 1.5 * 2^23 + 127: the low bits hold the integer and the bias of an exponent.
  const auto shifted = V::add(x, c(12583039.0f));
  const auto r = V::sub(x, V::sub(shifted, c(12583039.0f)));
  auto p = c(0x1.41fbbcp-13f);
  p = V::fma(p, r, c(0x1.5f3e54p-10f));
  p = V::fma(p, r, c(0x1.3b2d4cp-7f));
  p = V::fma(p, r, c(0x1.c6aee8p-5f));
  p = V::fma(p, r, c(0x1.ebfbdcp-3f));
  p = V::fma(p, r, c(0x1.62e430p-1f));
  p = V::fma(p, r, c(1.0f));
  return V::where_less(x, c(-126.0f), V::zero(), V::mul(p, V::power_of_two(shifted)));
}

// Turns keys [begin, end) of the block, and neighbours: out[column * 64 + key].
template <class V, class T>
void turn_keys(const T* const* rows, int64_t dim, int64_t begin, int64_t end, T* out) {
  constexpr int64_t kKeys = V::kTurned / static_cast<int64_t>(sizeof(T));
  constexpr int64_t kColumns = 16 / static_cast<int64_t>(sizeof(T));
  for (int64_t g = begin / kKeys * kKeys; g < end; g += kKeys) {
    int64_t d = 0;
    for (; d + kColumns <= dim; d += kColumns) V::turn(rows + g, d, out + d * kKeyBlock + g);
    for (; d < dim; ++d) {
      for (int64_t j = g; j < g + kKeys; ++j) out[d * kKeyBlock + j] = rows[j][d];
    }
  }
}

template <class T>
MINISGL_INLINE void prefetch_row(const T* row, int64_t dim) {
  const char* p = reinterpret_cast<const char*>(row);
  const int64_t bytes = dim * static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

// Keys of one head at `count` locations, on their way from memory.
template <KvKind kKind>
MINISGL_INLINE void prefetch_keys(const AttentionTask& task, int64_t kv_head,
                                  const int32_t* locations, int64_t count) {
  const int64_t dim = task.shape->head_dim;
  const auto* k = static_cast<const typename Element<kKind>::Type*>(task.kv->k) + kv_head * dim;
  for (int64_t j = 0; j < count; ++j) prefetch_row(k + locations[j] * task.kv->token_stride, dim);
}

// Reads keys [begin, end) of the block and prepares its values.
template <class V, KvKind kKind, bool kPacked>
void load_block(const AttentionTask& task, const Scratch& s, KeyBlockOf<kKind, kPacked>* block) {
  using T = typename Element<kKind>::Type;
  using Turned = typename Element<kKind>::Turned;
  const KVView& kv = *task.kv;
  const int64_t dim = task.shape->head_dim, heads = task.shape->num_kv_heads;
  const int64_t begin = block->begin, end = block->end;
  const T* k = static_cast<const T*>(kv.k) + task.kv_head * dim;
  const T* v = static_cast<const T*>(kv.v) + task.kv_head * dim;
  const int32_t* locations = task.locations + block->base;
  const T *keys[kKeyBlock], *values[kKeyBlock];
  for (int64_t j = begin; j < end; ++j) {
    const int64_t location = locations[j];
    keys[j] = k + location * kv.token_stride;
    values[j] = v + location * kv.token_stride;
    if constexpr (kKind == KvKind::kInt8) {
      s.k_scale[j] = kv.k_scale[location * heads + task.kv_head];
      s.v_scale[j] = kv.v_scale[location * heads + task.kv_head];
    }
  }
  // Keys are turned many at a time; where no row looks, any readable key will do.
  for (int64_t j = 0; j < begin; ++j) keys[j] = keys[begin];
  for (int64_t j = end; j < kKeyBlock; ++j) keys[j] = keys[begin];
  auto* turned = reinterpret_cast<Turned*>(s.turned);
  if constexpr (kKind == KvKind::kInt8) {
    const Turned* wide[kKeyBlock];
    auto* loose = reinterpret_cast<Turned*>(s.values);  // free until values are packed
    for (int64_t j = 0; j < kKeyBlock; ++j) {
      Turned* row = loose + j * s.pad;
      for (int64_t d = 0; d < dim; ++d) row[d] = static_cast<Turned>(keys[j][d]);
      wide[j] = row;
    }
    turn_keys<V>(wide, dim, begin, end, turned);
  } else {
    turn_keys<V>(keys, dim, begin, end, turned);
  }
  for (int64_t j = begin; j < end; ++j) prefetch_row(values[j], dim);
  if constexpr (!kPacked) {
    block->keys = turned;
    for (int64_t j = begin; j < end; ++j) block->values[j] = values[j];
  } else {
    if constexpr (kKind == KvKind::kFloat32) {
      block->keys = turned;
    } else {
      block->keys = s.keys;
      for (int64_t i = 0; i < dim * kKeyBlock; i += kVecLanes) {
        V::store(s.keys + i, load_turned<V, kKind>(turned + i));
      }
    }
    for (int64_t j = begin; j < end; ++j) {
      block->values[j] = s.values + j * s.pad;
      widen_row<V, kKind>(values[j], dim, s.values + j * s.pad);
    }
  }
}

// How many vectors of keys or columns R rows go through at once: as registers hold sums for.
template <class V, int R>
constexpr int kVecsOf = V::kSums / R >= 4 ? 4 : V::kSums / R >= 2 ? 2 : 1;

// scores[row][key] for R rows and N vectors of keys from vector g on.
template <class V, int R, int N, KvKind kStored, bool kScaled>
MINISGL_INLINE void score_tile(const Scratch& s, const KeyBlock<kStored, kScaled>& block,
                               const float* q, int64_t dim, int g) {
  typename V::Vec acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) acc[r][n] = V::zero();
  }
  const auto* keys = block.keys + g * kVecLanes;
  const int64_t pad = s.pad;
  for (int64_t d = 0; d < dim; ++d, ++q, keys += kKeyBlock) {
    typename V::Vec key[N];
    for (int n = 0; n < N; ++n) key[n] = load_turned<V, kStored>(keys + n * kVecLanes);
    for (int r = 0; r < R; ++r) {
      const auto query = V::broadcast(q[r * pad]);
      for (int n = 0; n < N; ++n) acc[r][n] = V::fma(query, key[n], acc[r][n]);
    }
  }
  for (int n = 0; n < N; ++n) {
    const int64_t at = (g + n) * kVecLanes;
    for (int r = 0; r < R; ++r) {
      auto score = acc[r][n];
      if constexpr (kScaled) score = V::mul(score, V::load(s.k_scale + at));
      V::store(s.scores + r * kKeyBlock + at, score);
    }
  }
}

template <class V, int R, class Block, int N = kVecsOf<V, R>>
void score_rows(const Scratch& s, const Block& block, const float* q, int64_t dim, int g,
                int last) {
  for (; g + N <= last; g += N) score_tile<V, R, N>(s, block, q, dim, g);
  if constexpr (N > 1) {
    if (g < last) score_rows<V, R, Block, N - 1>(s, block, q, dim, g, last);
  }
}

// out[row] = out[row] * factor[row] + sum over keys [begin, end) of weight[row][key] * value[key],
// N vectors of columns; weights of a row are kKeyBlock apart, its columns `pad`.
template <class V, KvKind kStored, int R, int N>
MINISGL_INLINE void value_tile(const typename Element<kStored>::Type* const* values,
                               const float* weight, int64_t begin, int64_t end, int64_t column,
                               const float* factor, float* out, int64_t pad) {
  out += column;
  typename V::Vec acc[R][N];
  for (int r = 0; r < R; ++r) {
    const auto scale = V::broadcast(factor[r]);
    for (int n = 0; n < N; ++n) {
      acc[r][n] = V::mul(V::load(out + r * pad + n * kVecLanes), scale);
    }
  }
  for (int64_t j = begin; j < end; ++j) {
    typename V::Vec value[N];
    for (int n = 0; n < N; ++n) {
      value[n] = load_element<V, kStored>(values[j] + column + n * kVecLanes);
    }
    for (int r = 0; r < R; ++r) {
      const auto w = V::broadcast(weight[r * kKeyBlock + j]);
      for (int n = 0; n < N; ++n) acc[r][n] = V::fma(w, value[n], acc[r][n]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) V::store(out + r * pad + n * kVecLanes, acc[r][n]);
  }
}

template <class V, KvKind kStored, int R>
void value_rows(const typename Element<kStored>::Type* const* values, const float* weight,
                int64_t begin, int64_t end, const float* factor, float* out, int64_t pad) {
  constexpr int kN = kVecsOf<V, R>;
  int64_t column = 0;
  for (; column + kN * kVecLanes <= pad; column += kN * kVecLanes) {
    value_tile<V, kStored, R, kN>(values, weight, begin, end, column, factor, out, pad);
  }
  for (; column < pad; column += kVecLanes) {
    value_tile<V, kStored, R, 1>(values, weight, begin, end, column, factor, out, pad);
  }
}

// What rows of a group see of a block: keys [begin, end) each, all of them together [low, high).
template <int R>
struct Ranges {
  int64_t begin[R], end[R];
  int64_t low, high;
};

// Scores of R rows become weights; keys that a row does not see get none. Updates maximum and sum
// of the rows; factor[row] is for what they have gathered so far.
template <class V, bool kScaled, int R, bool kFull>
void softmax_rows(const Scratch& s, int64_t first, const Ranges<R>& range, float* factor) {
  const int64_t g_begin = kFull ? 0 : range.low / kVecLanes;
  const int64_t g_end = kFull ? kKeyVecs : (range.high + kVecLanes - 1) / kVecLanes;
  alignas(64) float now[kVecLanes] = {}, shift[kVecLanes] = {}, sums[kVecLanes];
  for (int r = 0; r < R; ++r) {
    float* scores = s.scores + r * kKeyBlock;
    auto top = V::broadcast(kNone);
    for (int64_t g = g_begin; g < g_end; ++g) {
      auto x = V::load(scores + g * kVecLanes);
      if constexpr (!kFull) {
        const auto key = V::load(kIota + g * kVecLanes), none = V::broadcast(kNone);
        x = V::where_less(key, V::broadcast(static_cast<float>(range.end[r])), x, none);
        x = V::where_less(key, V::broadcast(static_cast<float>(range.begin[r])), none, x);
        V::store(scores + g * kVecLanes, x);
      }
      top = V::max(x, top);
    }
    now[r] = larger(V::largest(top), s.split.max[first + r]);
    shift[r] = now[r] == kNone ? 0.0f : now[r];  // no finite score so far: nothing to subtract
  }
  for (int r = 0; r < R; ++r) {
    float* scores = s.scores + r * kKeyBlock;
    const auto down = V::broadcast(shift[r]);
    auto sum = V::zero();
    for (int64_t g = g_begin; g < g_end; ++g) {
      auto weight = exp2_vec<V>(V::sub(V::load(scores + g * kVecLanes), down));
      sum = V::add(sum, weight);
      if constexpr (kScaled) {
        weight = V::mul(weight, V::load(s.v_scale + g * kVecLanes));
      }
      V::store(scores + g * kVecLanes, weight);
    }
    sums[r] = V::sum(sum);
  }
  V::store(factor, exp2_vec<V>(V::sub(V::load(s.split.max + first), V::load(shift))));
  for (int r = 0; r < R; ++r) {
    s.split.max[first + r] = now[r];
    s.split.sum[first + r] = __builtin_fmaf(s.split.sum[first + r], factor[r], sums[r]);
  }
}

// R rows from row `first` on, through one block.
template <class V, int R, KvKind kStored, bool kScaled>
void block_rows(const AttentionTask& task, const Scratch& s,
                const KeyBlock<kStored, kScaled>& block, int64_t first) {
  const int64_t dim = task.shape->head_dim, pad = s.pad;
  const float* q = s.queries + first * pad;
  float* out = s.split.out + first * pad;
  alignas(64) float factor[kVecLanes];
  Ranges<R> range;
  if (block.full) {
    score_rows<V, R>(s, block, q, dim, 0, kKeyVecs);
    softmax_rows<V, kScaled, R, true>(s, first, range, factor);
    value_rows<V, kStored, R>(block.values, s.scores, 0, kKeyBlock, factor, out, pad);
    return;
  }
  range.low = kKeyBlock;
  range.high = 0;
  int64_t shared_begin = 0, shared_end = kKeyBlock;  // what all rows see
  for (int r = 0; r < R; ++r) {
    const int64_t position = s.position[first + r];
    range.begin[r] = clamp(task.low(position) - block.base, 0, kKeyBlock);
    range.end[r] = clamp(position + 1 - block.base, 0, kKeyBlock);
    range.low = min64(range.low, range.begin[r]);
    range.high = max64(range.high, range.end[r]);
    shared_begin = max64(shared_begin, range.begin[r]);
    shared_end = min64(shared_end, range.end[r]);
  }
  if (range.low >= range.high) return;
  shared_end = max64(shared_begin, shared_end);
  const int first_vec = static_cast<int>(range.low / kVecLanes);
  const int last_vec = static_cast<int>((range.high + kVecLanes - 1) / kVecLanes);
  score_rows<V, R>(s, block, q, dim, first_vec, last_vec);
  softmax_rows<V, kScaled, R, false>(s, first, range, factor);
  // Each key in turn for each row: those before what all see, those that all see, those after.
  for (int r = 0; r < R; ++r) {
    const int64_t end = min64(shared_begin, range.end[r]);
    if (range.begin[r] >= end) continue;
    value_rows<V, kStored, 1>(block.values, s.scores + r * kKeyBlock, range.begin[r], end,
                              factor + r, out + r * pad, pad);
    factor[r] = 1.0f;
  }
  value_rows<V, kStored, R>(block.values, s.scores, shared_begin, shared_end, factor, out, pad);
  const float one = 1.0f;
  for (int r = 0; r < R; ++r) {
    const int64_t begin = max64(shared_end, range.begin[r]);
    if (begin >= range.end[r]) continue;
    value_rows<V, kStored, 1>(block.values, s.scores + r * kKeyBlock, begin, range.end[r], &one,
                              out + r * pad, pad);
  }
}

// All rows of the tile, in groups of V::kRows and a smaller last one.
template <class V, class Block, int R = V::kRows>
void block_all_rows(const AttentionTask& task, const Scratch& s, const Block& block,
                    int64_t first) {
  const int64_t rows = task.num_rows();
  for (; first + R <= rows; first += R) block_rows<V, R>(task, s, block, first);
  if constexpr (R > 1) {
    if (first < rows) block_all_rows<V, Block, R - 1>(task, s, block, first);
  }
}

}  // namespace
}  // namespace minisgl
