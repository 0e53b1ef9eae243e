// The attention kernels, written once over a vector class V of 16 float lanes; attention_<isa>.cpp
// supplies V. Everything is in an unnamed namespace: code compiled for one instruction set must
// never be merged by the linker with that of another.
//
// For each block of 64 keys: the keys are laid on their side (column by column, 64 keys each), so
// that a score is a chain over the columns in some lane; rows go through in groups that share each
// loaded key and value. Few rows widen 16-bit keys and values as they read them, many rows find
// them widened once. Grouping decides who shares loads, never the order of a sum. What is different
// over codes is in attention_integer_body.h.
#pragma once

#include "attention_load_body.h"

namespace minisgl {
namespace {

// Minimax fits of 2^x on [-1/2, 1/2], the constant fixed at 1: relative error 2e-9, and 3e-6 for
// weights that become codes of 13 bits.
constexpr float kPower[] = {0x1.41fbbcp-13f, 0x1.5f3e54p-10f, 0x1.3b2d4cp-7f, 0x1.c6aee8p-5f,
                            0x1.ebfbdcp-3f,  0x1.62e430p-1f,  1.0f};
constexpr float kShortPower[] = {0x1.3a02ccp-7f, 0x1.c9fc46p-5f, 0x1.ec0378p-3f, 0x1.62e12cp-1f,
                                 1.0f};

// `times` a polynomial, exactly so where it is a power of two.
template <class V, int N>
MINISGL_INLINE typename V::Vec polynomial(const float (&c)[N], typename V::Vec x, float times) {
  auto p = V::broadcast(times * c[0]);
  for (int i = 1; i < N; ++i) p = V::fma(p, x, V::broadcast(times * c[i]));
  return p;
}

// 2^x for x <= 0, and exactly 0 below -126; NaN stays NaN.
template <class V, int N = 7>
MINISGL_INLINE typename V::Vec exp2_vec(typename V::Vec x, const float (&power)[N] = kPower) {
  const auto least = V::broadcast(-126.0f);
  if constexpr (V::kScales) {
    const auto r = V::fraction(x);
    return V::scale_from(x, least, polynomial<V>(power, r, 1.0f), V::sub(x, r));
  } else {
    // 1.5 * 2^23 + 128: the low bits hold the integer and the bias of an exponent, plus 1. An even
    // number, so that halves go to the even integer, as above.
    const auto magic = V::broadcast(12583040.0f), shifted = V::add(x, magic);
    const auto p = polynomial<V>(power, V::sub(x, V::sub(shifted, magic)), 0.5f);
    return V::where_less(x, least, V::zero(), V::mul(p, V::power_of_two(shifted)));
  }
}

// How many vectors of keys or columns R rows go through at once: as registers hold sums for.
template <class V, int R>
constexpr int kVecsOf = V::kSums / R >= 4 ? 4 : V::kSums / R >= 2 ? 2 : 1;

// scores[row][key] for R rows and N vectors of keys from vector g on.
template <class V, int R, int N, KvKind kStored>
MINISGL_INLINE void score_tile(const Scratch& s, const KeyBlock<kStored>& block, const float* q,
                               int64_t dim, int g) {
  typename V::Vec acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) acc[r][n] = V::zero();
  }
  const auto* keys = block.keys + g * kVecLanes;
  const int64_t pad = s.pad;
  for (int64_t d = 0; d < dim; ++d, ++q, keys += kKeyBlock) {
    typename V::Vec key[N];
    for (int n = 0; n < N; ++n) key[n] = load_element<V, kStored>(keys + n * kVecLanes);
    for (int r = 0; r < R; ++r) {
      const auto query = V::broadcast(q[r * pad]);
      for (int n = 0; n < N; ++n) acc[r][n] = V::fma(query, key[n], acc[r][n]);
    }
  }
  for (int n = 0; n < N; ++n) {
    const int64_t at = (g + n) * kVecLanes;
    for (int r = 0; r < R; ++r) V::store(s.scores + r * kKeyBlock + at, acc[r][n]);
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
// N vectors of columns; weights of a row are kKeyBlock apart, its columns `pad`. The keys of `next`
// are fetched beside them.
template <class V, KvKind kStored, int R, int N>
MINISGL_INLINE void value_tile(const typename Element<kStored>::Type* const* values,
                               const float* weight, int64_t begin, int64_t end, int64_t column,
                               const float* factor, float* out, int64_t pad,
                               const NextKeys* next) {
  out += column;
  typename V::Vec acc[R][N];
  for (int r = 0; r < R; ++r) {
    const auto scale = V::broadcast(factor[r]);
    for (int n = 0; n < N; ++n) {
      acc[r][n] = V::mul(V::load(out + r * pad + n * kVecLanes), scale);
    }
  }
  const int64_t next_end = next == nullptr ? 0 : next->count;
  for (int64_t j = begin; j < end; ++j) {
    typename V::Vec value[N];
    for (int n = 0; n < N; ++n) {
      value[n] = load_element<V, kStored>(values[j] + column + n * kVecLanes);
    }
    if (j < next_end) next->fetch(j);
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
                int64_t begin, int64_t end, const float* factor, float* out, int64_t pad,
                const NextKeys* next = nullptr) {
  constexpr int kN = kVecsOf<V, R>;
  int64_t column = 0;
  for (; column + kN * kVecLanes <= pad; column += kN * kVecLanes) {
    value_tile<V, kStored, R, kN>(values, weight, begin, end, column, factor, out, pad, next);
    next = nullptr;
  }
  for (; column < pad; column += kVecLanes) {
    value_tile<V, kStored, R, 1>(values, weight, begin, end, column, factor, out, pad, next);
    next = nullptr;
  }
}

// What rows of a group see of a block: keys [begin, end) each, all of them together [low, high).
template <int R>
struct Ranges {
  int64_t begin[R], end[R];
  int64_t low, high;

  Ranges(const AttentionTask& task, const int32_t* position, int64_t base)
      : low(kKeyBlock), high(0) {
    for (int r = 0; r < R; ++r) {
      begin[r] = clamp(task.low(position[r]) - base, 0, kKeyBlock);
      end[r] = clamp(position[r] + 1 - base, 0, kKeyBlock);
      low = min64(low, begin[r]);
      high = max64(high, end[r]);
    }
  }
};

// The largest score of each of R rows, in vectors [g_begin, g_end); keys that a row does not see
// get none. kCodes: scores want multiplying by q_scale of their row.
template <class V, bool kCodes, int R, bool kFull>
typename V::Vec largest_scores(const Scratch& s, float* scores, int64_t first,
                               const Ranges<R>* range, int64_t g_begin, int64_t g_end) {
  if constexpr (kFull) {
    g_begin = 0;
    g_end = kKeyVecs;
  }
  typename V::Vec each[R];
  for (int r = 0; r < R; ++r, scores += kKeyBlock) {
    each[r] = V::broadcast(kNone);
    for (int64_t g = g_begin; g < g_end; ++g) {
      auto x = V::load(scores + g * kVecLanes);
      if constexpr (!kFull) {
        const auto key = V::load(kIota + g * kVecLanes), none = V::broadcast(kNone);
        x = V::where_less(key, V::broadcast(static_cast<float>(range->end[r])), x, none);
        x = V::where_less(key, V::broadcast(static_cast<float>(range->begin[r])), none, x);
        V::store(scores + g * kVecLanes, x);
      }
      each[r] = V::max(x, each[r]);
    }
  }
  const auto largest = V::template largests<R>(each);
  if constexpr (kCodes) return V::mul(largest, V::load(s.q_scale + first));
  return largest;
}

// Scores become weights. Updates maximum and sum of the rows, given the largest scores; factor[row]
// is for what they have gathered so far. kCodes: weights want multiplying by v_scale of their key,
// after which most[row] is the largest.
template <class V, bool kCodes, int R, bool kFull>
void softmax_rows(const Scratch& s, float* scores, int64_t first, int64_t g_begin, int64_t g_end,
                  typename V::Vec largest, float* factor, float* most) {
  if constexpr (kFull) {
    g_begin = 0;
    g_end = kKeyVecs;
  }
  alignas(64) float shifts[kVecLanes];
  typename V::Vec each[R], scaled[R];
  float *max = s.split.max + first, *sum = s.split.sum + first;
  const auto before = V::load(max), now = V::max(largest, before);
  // Where there was no finite score so far there is nothing to subtract.
  const auto shift = V::where_less(V::broadcast(kNone), now, now, V::zero());
  V::store(shifts, shift);
  for (int r = 0; r < R; ++r, scores += kKeyBlock) {
    const auto down = V::broadcast(shifts[r]);
    each[r] = V::zero();
    if constexpr (kCodes) {
      const auto scale = V::broadcast(s.q_scale[first + r]);
      scaled[r] = V::zero();
      for (int64_t g = g_begin; g < g_end; ++g) {
        // Rounded like the largest one, so that nothing is above it however large they are.
        const auto score = V::mul(V::load(scores + g * kVecLanes), scale);
        auto weight = exp2_vec<V>(V::sub(score, down), kShortPower);
        each[r] = V::add(each[r], weight);
        weight = V::mul(weight, V::load(s.v_scale + g * kVecLanes));
        scaled[r] = V::max(weight, scaled[r]);
        V::store(scores + g * kVecLanes, weight);
      }
    } else {
      for (int64_t g = g_begin; g < g_end; ++g) {
        const auto weight = exp2_vec<V>(V::sub(V::load(scores + g * kVecLanes), down));
        each[r] = V::add(each[r], weight);
        V::store(scores + g * kVecLanes, weight);
      }
    }
  }
  if constexpr (kCodes) V::store(most, V::template largests<R>(scaled));
  const auto keep = exp2_vec<V>(V::sub(before, shift)), old = V::load(sum);
  V::store(factor, keep);
  const auto all = V::fma(old, keep, V::template sums<R>(each));
  const auto lane = V::load(kIota), count = V::broadcast(static_cast<float>(R));
  V::store(max, V::where_less(lane, count, now, before));
  V::store(sum, V::where_less(lane, count, all, old));
}

// R rows from row `first` on, through one block.
template <class V, int R, KvKind kStored>
void block_rows(const AttentionTask& task, const Scratch& s, const KeyBlock<kStored>& block,
                int64_t first, const NextKeys* next) {
  const int64_t dim = task.shape->head_dim, pad = s.pad;
  const float* q = s.queries + first * pad;
  float* out = s.split.out + first * pad;
  alignas(64) float factor[kVecLanes];
  if (block.full) {
    score_rows<V, R>(s, block, q, dim, 0, kKeyVecs);
    const auto most = largest_scores<V, false, R, true>(s, s.scores, first, nullptr, 0, kKeyVecs);
    softmax_rows<V, false, R, true>(s, s.scores, first, 0, kKeyVecs, most, factor, nullptr);
    value_rows<V, kStored, R>(block.values, s.scores, 0, kKeyBlock, factor, out, pad, next);
    return;
  }
  const Ranges<R> range(task, s.position + first, block.base);
  if (range.low >= range.high) return;
  int64_t shared_begin = 0, shared_end = kKeyBlock;  // what all rows see
  for (int r = 0; r < R; ++r) {
    shared_begin = max64(shared_begin, range.begin[r]);
    shared_end = min64(shared_end, range.end[r]);
  }
  shared_end = max64(shared_begin, shared_end);
  const int first_vec = static_cast<int>(range.low / kVecLanes);
  const int last_vec = static_cast<int>((range.high + kVecLanes - 1) / kVecLanes);
  score_rows<V, R>(s, block, q, dim, first_vec, last_vec);
  const auto most =
      largest_scores<V, false, R, false>(s, s.scores, first, &range, first_vec, last_vec);
  softmax_rows<V, false, R, false>(s, s.scores, first, first_vec, last_vec, most, factor, nullptr);
  // Each key in turn for each row: those before what all see, those that all see, those after.
  for (int r = 0; r < R; ++r) {
    const int64_t end = min64(shared_begin, range.end[r]);
    if (range.begin[r] >= end) continue;
    value_rows<V, kStored, 1>(block.values, s.scores + r * kKeyBlock, range.begin[r], end,
                              factor + r, out + r * pad, pad);
    factor[r] = 1.0f;
  }
  value_rows<V, kStored, R>(block.values, s.scores, shared_begin, shared_end, factor, out, pad,
                            next);
  const float one = 1.0f;
  for (int r = 0; r < R; ++r) {
    const int64_t begin = max64(shared_end, range.begin[r]);
    if (begin >= range.end[r]) continue;
    value_rows<V, kStored, 1>(block.values, s.scores + r * kKeyBlock, begin, range.end[r], &one,
                              out + r * pad, pad);
  }
}

}  // namespace
}  // namespace minisgl
