// Attention over codes: what is different where keys and values are integers with a scale for each
// token; part of attention_body.h. Int8 codes are widened to 16 bits when a block is loaded.
//
// A query becomes codes of up to 13 bits once, the weights of a row times the scales of the values
// do in every block. Two codes side by side, a pair, are one lane of 32 bits: one instruction
// multiplies 16 pairs by another and adds each lane's two products to its sum. Sums of scores go
// over pairs of columns, sums of outputs over pairs of keys, both in the same tile. They are exact,
// so that they need no order, and a key that a row does not see has a weight of 0.
#pragma once

#include <utility>

#include "attention_body.h"
#include "attention_query_body.h"

namespace minisgl {
namespace {

constexpr float kMostWeight = 8191.0f;  // 64 keys of it, times 4095, fit into 32 bits

// kPacked: values lie in scratch as pairs of keys, otherwise rows of 32 columns are read in place;
// so are keys where V::kDirect says that this is better than to turn them for few rows.
template <bool kPacked>
struct CodeBlock {
  int64_t base;        // absolute position of the block's first key
  int64_t begin, end;  // what the tile sees of it
  bool full;           // every row sees every key
  const Pair* keys;    // on their side: [pair of columns][64 keys]
  const Pair* packed;  // [pair of keys][padded columns]
  const int16_t *rows[kKeyBlock], *values[kKeyBlock];
};

// Key j of each half of a block is the partner of key j + 16.
MINISGL_INLINE int64_t key_of_pair(int64_t pair) {
  return pair + (pair & -kVecLanes);
}

// A row of 16-bit codes, padded by zeros to `width`.
template <class T>
const int16_t* widen_codes(const T* row, int64_t dim, int64_t width, int16_t* out) {
  for (int64_t d = 0; d < dim; ++d) out[d] = row[d];
  for (int64_t d = dim; d < width; ++d) out[d] = 0;
  return out;
}

// Pairs of 32 columns of two rows, as one vector and the next. The keys of `next` are fetched
// beside them.
template <class V>
void pack_values(const int16_t* const* values, int64_t pad, Pair* out, const NextKeys& next) {
  for (int64_t p = 0; p < kKeyPairs; ++p, out += pad) {
    const int64_t j = key_of_pair(p);
    next.fetch_two(2 * p);
    for (int64_t c = 0; c < pad; c += 2 * kVecLanes) {
      typename V::Pairs both[2];
      V::interleave(values[j] + c, values[j + kVecLanes] + c, both);
      V::store_pairs(out + c, both[0]);
      if (c + kVecLanes < pad) V::store_pairs(out + c + kVecLanes, both[1]);
    }
  }
}

// Simple loops of their own, which compilers make vectors of.
template <class T>
MINISGL_INLINE void find_rows(const T* pool, const int32_t* locations, int64_t stride,
                              int64_t begin, int64_t end, const T** rows) {
  for (int64_t j = begin; j < end; ++j) rows[j] = pool + locations[j] * stride;
}

MINISGL_INLINE void find_scales(const float* __restrict scales, const int32_t* locations,
                                int64_t heads, int64_t begin, int64_t end, float* __restrict out) {
  for (int64_t j = begin; j < end; ++j) out[j] = scales[locations[j] * heads];
}

// Reads keys [begin, end) of the block and prepares its values.
template <class V, KvKind kKind, bool kPacked>
void load_block(const AttentionTask& task, const Scratch& s, const NextKeys& next,
                CodeBlock<kPacked>* block) {
  using T = typename Element<kKind>::Type;
  const KVView& kv = *task.kv;
  const int64_t dim = task.shape->head_dim, heads = task.shape->num_kv_heads;
  const int64_t begin = block->begin, end = block->end;
  const T* k = static_cast<const T*>(kv.k) + task.kv_head * dim;
  const T* v = static_cast<const T*>(kv.v) + task.kv_head * dim;
  const int32_t* locations = task.locations + block->base;
  const T *keys[kKeyBlock], *values[kKeyBlock];
  find_rows(k, locations, kv.token_stride, begin, end, keys);
  find_rows(v, locations, kv.token_stride, begin, end, values);
  find_scales(kv.k_scale + task.kv_head, locations, heads, begin, end, s.k_scale);
  find_scales(kv.v_scale + task.kv_head, locations, heads, begin, end, s.v_scale);
  // Where no row looks, any readable key will do: its weight is 0.
  const auto fill = [&](int64_t from, int64_t until) {
    for (int64_t j = from; j < until; ++j) {
      keys[j] = keys[begin];
      values[j] = values[begin];
      s.k_scale[j] = s.v_scale[j] = 0.0f;
    }
  };
  fill(0, begin);
  fill(end, kKeyBlock);
  // A value that is not finite shows in the score, and so in the sum of the weights.
  const auto infinity = V::broadcast(-kNone), nan = V::broadcast(__builtin_nanf(""));
  for (int64_t j = 0; j < kKeyBlock; j += kVecLanes) {
    const auto k_scale = V::load(s.k_scale + j), v_scale = V::load(s.v_scale + j);
    V::store(s.k_scale + j, V::where_less(v_scale, infinity, k_scale, nan));
    V::store(s.v_scale + j, V::where_less(v_scale, infinity, v_scale, V::zero()));
  }
  const int64_t width = (s.pad + 2 * kVecLanes - 1) / (2 * kVecLanes) * (2 * kVecLanes);
  auto* loose = reinterpret_cast<int16_t*>(s.keys);
  const auto loosen = [&](const T* const* rows, const int16_t** out) {
    for (int64_t j = 0; j < kKeyBlock; ++j) {
      out[j] = widen_codes(rows[j], dim, width, loose + j * width);
    }
  };
  const auto in_place = [&](const T* const* rows, const int16_t** out) {
    if constexpr (kKind == KvKind::kInt16) std::memcpy(out, rows, sizeof(values));
  };
  if constexpr (!kPacked) in_place(values, block->values);
  if constexpr (!kPacked && V::kDirect) {
    in_place(keys, block->rows);
    return;
  }
  const int16_t* wide[kKeyBlock];
  if (kKind == KvKind::kInt16 && dim % 2 == 0) {
    in_place(keys, wide);
  } else {
    loosen(keys, wide);
  }
  const Pair* paired[kKeyBlock];
  for (int64_t j = 0; j < kKeyBlock; ++j) paired[j] = reinterpret_cast<const Pair*>(wide[j]);
  auto* turned = reinterpret_cast<Pair*>(s.turned);
  turn_keys<V>(paired, (dim + 1) / 2, begin, end, turned, values,
               dim * static_cast<int64_t>(sizeof(T)));
  block->keys = turned;
  if constexpr (kPacked) {
    if (kKind == KvKind::kInt16 && dim == width) {
      in_place(values, wide);
    } else {
      loosen(values, wide);
    }
    auto* packed = reinterpret_cast<Pair*>(s.values);
    pack_values<V>(wide, s.pad, packed, next);
    block->packed = packed;
  }
}

// Sums over pairs [first, last) of row's factor times vector n of what `load` finds go to `store`.
template <class V, int R, int N, class Load, class Store>
MINISGL_INLINE void dot_tile(const Pair* factors, int64_t stride, int64_t first, int64_t last,
                             const Load& load, const Store& store) {
  typename V::Ints sum[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) sum[r][n] = V::zero_ints();
  }
  factors += first;
  for (int64_t p = first; p < last; ++p, ++factors) {
    typename V::Pairs pairs[N];
    load(p, pairs);
    for (int r = 0; r < R; ++r) {
      const auto factor = V::broadcast_pair(factors + r * stride);
      for (int n = 0; n < N; ++n) sum[r][n] = V::dot(factor, pairs[n], sum[r][n]);
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int r = 0; r < R; ++r) store(r, n, V::to_floats(sum[r][n]));
  }
}

// scores[row][key] but for the scale of the row, for R rows and vectors [g, last) of keys, N at a
// time.
template <class V, int R, int N = kVecsOf<V, R>>
void code_scores(const Scratch& s, float* scores, const Pair* keys, int64_t first, int64_t pairs,
                 int64_t g, int64_t last) {
  for (; g + N <= last; g += N) {
    const auto load = [&](int64_t p, typename V::Pairs(&out)[N]) {
      for (int n = 0; n < N; ++n) {
        out[n] = V::load_pairs(keys + p * kKeyBlock + (g + n) * kVecLanes);
      }
    };
    const auto* queries = reinterpret_cast<const Pair*>(query_codes(s, first));
    dot_tile<V, R, N>(queries, s.pad / 2, 0, pairs, load, [&](int r, int n, auto dot) {
      const int64_t at = (g + n) * kVecLanes;
      V::store(scores + r * kKeyBlock + at, V::mul(dot, V::load(s.k_scale + at)));
    });
  }
  if constexpr (N > 1) {
    if (g < last) code_scores<V, R, N - 1>(s, scores, keys, first, pairs, g, last);
  }
}

// The same from keys where they lie, for as many rows from row r on as registers hold sums for;
// values are fetched beside them.
template <class V, int R>
void direct_scores(const Scratch& s, float* scores, const CodeBlock<false>& block, int64_t first,
                   int r, int64_t g, int64_t last) {
  constexpr int kRows = R < 3 ? R : 3;
  for (int64_t at = g * kVecLanes; at < last * kVecLanes; at += kVecLanes) {
    typename V::Ints dots[kRows];
    V::template dots<kRows>(block.rows + at, twice(s, first + r), s.pad, block.values + at, dots);
    const auto scale = V::load(s.k_scale + at);
    for (int i = 0; i < kRows; ++i) {
      V::store(scores + (r + i) * kKeyBlock + at, V::mul(V::to_floats(dots[i]), scale));
    }
  }
  if constexpr (R > kRows) direct_scores<V, R - kRows>(s, scores, block, first, r + kRows, g, last);
}

template <class V, int R, bool kPacked>
MINISGL_INLINE void any_scores(const Scratch& s, float* scores, const CodeBlock<kPacked>& block,
                               int64_t first, int64_t pairs, int64_t g, int64_t last) {
  if constexpr (!kPacked && V::kDirect) {
    direct_scores<V, R>(s, scores, block, first, 0, g, last);
  } else {
    code_scores<V, R>(s, scores, block.keys, first, pairs, g, last);
  }
}

// What makes codes of the weights of rows, given their largest, and what a code of 1 stands for.
template <class V>
void code_factors(const float* most, float* factor, float* unit) {
  const auto largest = V::load(most), least = V::broadcast(kLeast), zero = V::zero();
  const auto inverse = V::div(V::broadcast(kMostWeight), largest);
  V::store(factor, V::where_less(least, largest, inverse, zero));
  const auto scale = V::mul(largest, V::broadcast(1.0f / kMostWeight));
  V::store(unit, V::where_less(least, largest, scale, zero));
}

// Weights times scales of values, of halves [begin, end) of the block, as codes.
template <class V, int R>
void code_weights(const Scratch& s, const float* scores, int64_t begin, int64_t end,
                  const float* factor) {
  const auto round = V::broadcast(kRound);
  for (int r = 0; r < R; ++r) {
    const auto by = V::broadcast(factor[r]);
    for (int64_t h = begin; h < end; ++h) {
      const float* weight = scores + r * kKeyBlock + h * 2 * kVecLanes;
      const auto low = V::fma(V::load(weight), by, round);
      const auto high = V::fma(V::load(weight + kVecLanes), by, round);
      V::store_pairs(s.weights + r * kKeyPairs + h * kVecLanes, V::join_codes(low, high));
    }
  }
}

// out[row] = out[row] * factor[row] + unit[row] * sum of weights times values over pairs [first,
// last), for N vectors of columns. Where values are read in place, the keys of `next` are fetched
// beside them.
template <class V, int R, int N, bool kPacked>
MINISGL_INLINE void code_value_tile(const Scratch& s, const CodeBlock<kPacked>& block,
                                    int64_t first, int64_t last, int64_t column,
                                    const float* factor, const float* unit, float* out,
                                    const NextKeys* next) {
  const int64_t pad = s.pad;
  const auto load = [&](int64_t p, typename V::Pairs(&pairs)[N]) {
    if constexpr (kPacked) {
      const Pair* values = block.packed + p * pad + column;
      for (int n = 0; n < N; ++n) pairs[n] = V::load_pairs(values + n * kVecLanes);
    } else {
      const int64_t j = key_of_pair(p);
      for (int n = 0; n < N; n += 2) {
        typename V::Pairs both[2];
        V::interleave(block.values[j] + column + n * kVecLanes,
                      block.values[j + kVecLanes] + column + n * kVecLanes, both);
        pairs[n] = both[0];
        if (n + 1 < N) pairs[n + 1] = both[1];
      }
      if (next != nullptr) next->fetch_two(2 * p);
    }
  };
  dot_tile<V, R, N>(s.weights, kKeyPairs, first, last, load, [&](int r, int n, auto dot) {
    float* to = out + r * pad + column + n * kVecLanes;
    const auto kept = V::mul(V::load(to), V::broadcast(factor[r]));
    V::store(to, V::fma(dot, V::broadcast(unit[r]), kept));
  });
}

// R rows through one block, in three steps. The end of each waits for what many instructions fold,
// so that steps of two groups take turns.
template <class V, int R, bool kPacked>
struct RowGroup {
  const AttentionTask& task;
  const Scratch& s;
  const CodeBlock<kPacked>& block;
  float* scores;
  int64_t first, half, end_half, last;  // row; halves of the block and pairs that the rows see
  typename V::Vec largest;
  alignas(64) float factor[kVecLanes], unit[kVecLanes], by[kVecLanes];

  RowGroup(const AttentionTask& t, const Scratch& scratch, const CodeBlock<kPacked>& b, int buffer)
      : task(t), s(scratch), block(b), scores(s.scores + buffer * kMaxRows * kKeyBlock) {}

  // Scores of the rows from row `row` on.
  MINISGL_INLINE void score(int64_t row) {
    const int64_t pairs = (task.shape->head_dim + 1) / 2;
    first = row;
    if (block.full) {
      half = 0;
      end_half = 2;
      last = kKeyPairs;
      any_scores<V, R>(s, scores, block, first, pairs, 0, kKeyVecs);
      largest = largest_scores<V, true, R, true>(s, scores, first, nullptr, 0, kKeyVecs);
      return;
    }
    const Ranges<R> range(task, s.position + first, block.base);
    constexpr int64_t kHalf = 2 * kVecLanes;
    half = range.low / kHalf;
    end_half = (range.high + kHalf - 1) / kHalf;
    last = (end_half - 1) * kVecLanes + min64(kVecLanes, range.high - (end_half - 1) * kHalf);
    if (range.low >= range.high) {  // nothing to see
      end_half = half;
      return;
    }
    any_scores<V, R>(s, scores, block, first, pairs, range.low / kVecLanes,
                     (range.high + kVecLanes - 1) / kVecLanes);
    largest = largest_scores<V, true, R, false>(s, scores, first, &range, 2 * half, 2 * end_half);
  }

  // Scores become weights, and what makes codes of these is computed.
  MINISGL_INLINE void soften() {
    alignas(64) float most[kVecLanes];
    if (half == end_half) return;
    if (block.full) {
      softmax_rows<V, true, R, true>(s, scores, first, 0, kKeyVecs, largest, factor, most);
    } else {
      softmax_rows<V, true, R, false>(s, scores, first, 2 * half, 2 * end_half, largest, factor,
                                      most);
    }
    code_factors<V>(most, by, unit);
  }

  // The weights become codes and gather values. In one function with the other steps a decode takes
  // 4 % longer with AVX2.
  __attribute__((noinline)) void gather(const NextKeys* next) {
    if (half == end_half) return;
    code_weights<V, R>(s, scores, half, end_half, by);
    constexpr int kN = kPacked || kVecsOf<V, R> > 1 ? kVecsOf<V, R> : 2;
    float* out = s.split.out + first * s.pad;
    int64_t column = 0;
    for (; column + kN * kVecLanes <= s.pad; column += kN * kVecLanes) {
      code_value_tile<V, R, kN>(s, block, half * kVecLanes, last, column, factor, unit, out, next);
      next = nullptr;
    }
    constexpr int kRest = kPacked ? 1 : 2;
    for (; column < s.pad; column += kRest * kVecLanes) {
      code_value_tile<V, R, kRest>(s, block, half * kVecLanes, last, column, factor, unit, out,
                                   next);
      next = nullptr;
    }
  }
};

// All rows of the tile, in groups of V::kRows and a smaller last one; the first fetches `next`.
template <class V, bool kPacked, int R = V::kRows>
void block_all_rows(const AttentionTask& task, const Scratch& s, const CodeBlock<kPacked>& block,
                    int64_t first, const NextKeys* next) {
  const int64_t rows = task.num_rows();
  using Group = RowGroup<V, R, kPacked>;
  Group groups[2] = {{task, s, block, 0}, {task, s, block, 1}};
  Group *now = groups, *then = groups + 1;
  for (int64_t row = first - R; row + R <= rows; row += R) {
    if (row >= first) now->soften();
    if (row + 2 * R <= rows) then->score(row + R);
    if (row >= first) {
      now->gather(next);
      next = nullptr;
    }
    std::swap(now, then);
  }
  first += (rows - first) / R * R;
  if constexpr (R > 1) {
    if (first < rows) block_all_rows<V, kPacked, R - 1>(task, s, block, first, next);
  }
}

}  // namespace
}  // namespace minisgl
