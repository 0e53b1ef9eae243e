// A task from its first split to its last: the loop over blocks, and the merging of splits.
#pragma once

#include <type_traits>
#include <utility>

#include "attention_body.h"
#include "attention_integer_body.h"

namespace minisgl {
namespace {

constexpr int64_t kRowsWorthPacking = 8;  // below, packed values would be read too few times

inline void clear_rows(const RowState& state, int64_t rows, int64_t pad) {
  std::memset(state.out, 0, static_cast<size_t>(rows * pad) * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) {
    state.max[r] = kNone;
    state.sum[r] = 0.0f;
  }
}

// Where the unmerged result of a split lies; space for whole vectors of maxima and sums.
inline RowState partial_state(const AttentionTask& task, const Scratch& s, int64_t split) {
  const int64_t rows = task.num_rows();
  float* out = task.partials + (split - task.partial_split) * partial_floats(s.pad, rows);
  float* max = out + rows * s.pad;
  return {out, max, max + padded_dim(rows)};
}

// Whether a row sees a key of the split: rows that do not must not merge it.
inline bool row_in_split(const AttentionTask& task, int64_t position, int64_t split) {
  const int64_t base = split * kKeySplit;
  return position >= base && task.low(position) < base + kKeySplit;
}

// Adds what up to 16 rows, from row `first` on, have gathered in a split to their totals.
template <class V>
void merge_rows(const AttentionTask& task, const Scratch& s, const RowState& part, int64_t split,
                int64_t first) {
  const int64_t count = min64(kVecLanes, task.num_rows() - first);
  alignas(64) float keep[kVecLanes], add[kVecLanes], now[kVecLanes];
  const auto before = V::load(s.total.max + first), max = V::load(part.max + first);
  const auto most = V::max(max, before);
  V::store(now, most);
  V::store(keep, exp2_vec<V>(V::sub(before, most)));
  V::store(add, exp2_vec<V>(V::sub(max, most)));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = first + i;
    if (!row_in_split(task, s.position[row], split)) continue;
    const float* out = part.out + row * s.pad;
    float* total = s.total.out + row * s.pad;
    if (s.total.max[row] == kNone) {
      std::memcpy(total, out, static_cast<size_t>(s.pad) * sizeof(float));
      s.total.sum[row] = part.sum[row];
    } else {
      const auto keep_vec = V::broadcast(keep[i]), add_vec = V::broadcast(add[i]);
      for (int64_t c = 0; c < s.pad; c += kVecLanes) {
        const auto kept = V::mul(V::load(total + c), keep_vec);
        V::store(total + c, V::fma(V::load(out + c), add_vec, kept));
      }
      s.total.sum[row] = __builtin_fmaf(part.sum[row], add[i], s.total.sum[row] * keep[i]);
    }
    s.total.max[row] = now[i];
  }
}

template <class V>
void merge_split(const AttentionTask& task, const Scratch& s, const RowState& part, int64_t split) {
  for (int64_t first = 0; first < task.num_rows(); first += kVecLanes) {
    merge_rows<V>(task, s, part, split, first);
  }
}

template <class V>
void write_rows(const AttentionTask& task, const Scratch& s) {
  const int64_t dim = task.shape->head_dim, group = task.group();
  for (int64_t row = 0; row < task.num_rows(); ++row) {
    float* total = s.total.out + row * s.pad;
    const auto inverse = V::broadcast(1.0f / s.total.sum[row]);
    float* out = task.out + row / group * task.out_stride + row % group * dim;
    int64_t c = 0;
    for (; c + kVecLanes <= dim; c += kVecLanes) {
      V::store(out + c, V::mul(V::load(total + c), inverse));
    }
    if (c == dim) continue;
    V::store(total + c, V::mul(V::load(total + c), inverse));
    std::memcpy(out + c, total + c, static_cast<size_t>(dim - c) * sizeof(float));
  }
}

inline void load_positions(const AttentionTask& task, const Scratch& s) {
  for (int64_t i = 0, row = 0; i < task.num_queries; ++i) {
    for (int64_t h = 0; h < task.group(); ++h) {
      s.position[row++] = static_cast<int32_t>(task.first_position + i);
    }
  }
}

// The keys of the task from position `from` on, or the first ones of what this thread does next.
template <KvKind kKind>
NextKeys next_keys(const AttentionTask& task, int64_t from, int64_t end) {
  using T = typename Element<kKind>::Type;
  const int64_t dim = task.shape->head_dim, size = static_cast<int64_t>(sizeof(T));
  const int64_t rest = min64(end, task.end_split * kKeySplit) - from;
  const int64_t head = rest > 0 ? task.kv_head : task.next_kv_head;
  NextKeys next;
  next.first = static_cast<const char*>(task.kv->k) + head * dim * size;
  next.locations = rest > 0 ? task.locations + from : task.next_locations;
  next.count = rest > 0 ? min64(rest, kKeyBlock) : task.next_keys;
  next.stride = task.kv->token_stride * size;
  next.bytes = dim * size;
  return next;
}

// All rows of the tile, in groups of V::kRows and a smaller last one; the first fetches `next`.
template <class V, KvKind kStored, int R = V::kRows>
void block_all_rows(const AttentionTask& task, const Scratch& s, const KeyBlock<kStored>& block,
                    int64_t first, const NextKeys* next) {
  const int64_t rows = task.num_rows();
  for (; first + R <= rows; first += R) {
    block_rows<V, R>(task, s, block, first, next);
    next = nullptr;
  }
  if constexpr (R > 1) {
    if (first < rows) block_all_rows<V, kStored, R - 1>(task, s, block, first, next);
  }
}

template <class V, KvKind kKind, class Block>
void run_split(const AttentionTask& task, const Scratch& s, int64_t split) {
  const int64_t last = task.first_position + task.num_queries - 1;
  const int64_t low = max64(task.low(task.first_position), split * kKeySplit);
  const int64_t high = min64(last + 1, (split + 1) * kKeySplit);
  clear_rows(s.split, task.num_rows(), s.pad);
  Block block;
  for (int64_t at = low / kKeyBlock * kKeyBlock; at < high; at += kKeyBlock) {
    block.base = at;
    block.begin = max64(low - at, 0);
    block.end = min64(high - at, kKeyBlock);
    block.full = at + kKeyBlock <= task.first_position + 1 && task.low(last) <= at;
    const NextKeys next = next_keys<kKind>(task, at + kKeyBlock, last + 1);
    load_block<V, kKind>(task, s, next, &block);
    block_all_rows<V>(task, s, block, 0, &next);
  }
}

template <class V, KvKind kKind>
void run_attention(const AttentionTask& task) {
  Scratch s(task);
  const int64_t rows = task.num_rows(), dim = task.shape->head_dim;
  constexpr bool kCodes = has_scales(kKind);
  using Packed = std::conditional_t<kCodes, CodeBlock<true>, KeyBlock<KvKind::kFloat32>>;
  using Loose = std::conditional_t<kCodes, CodeBlock<kKind == KvKind::kInt8>,
                                   KeyBlock<kCodes ? KvKind::kFloat32 : kKind>>;
  // Values can be read where they lie only if their rows are whole vectors.
  const bool pack = dim % (kCodes ? 2 * kVecLanes : kVecLanes) != 0 ||
                    (kKind != KvKind::kFloat32 && rows > kRowsWorthPacking);
  load_queries<V, kKind>(task, s);
  load_positions(task, s);
  if (kCodes && V::kDirect && !pack) repeat_queries(s, rows);
  for (int64_t split = task.first_split; split < task.end_split; ++split) {
    // The first one may gather in the totals: there is nothing to add it to.
    const bool direct = task.partials == nullptr && split == task.first_split;
    if (direct) std::swap(s.split, s.total);
    if (pack) {
      run_split<V, kKind, Packed>(task, s, split);
    } else {
      run_split<V, kKind, Loose>(task, s, split);
    }
    if (direct) {
      std::swap(s.split, s.total);
    } else if (task.partials == nullptr) {
      merge_split<V>(task, s, s.split, split);
    } else {
      const RowState part = partial_state(task, s, split);
      std::memcpy(part.out, s.split.out, static_cast<size_t>(rows * s.pad) * sizeof(float));
      std::memcpy(part.max, s.split.max, static_cast<size_t>(rows) * sizeof(float));
      std::memcpy(part.sum, s.split.sum, static_cast<size_t>(rows) * sizeof(float));
    }
  }
  if (task.partials == nullptr) write_rows<V>(task, s);
}

template <class V>
void merge_partials(const AttentionTask& task) {
  const Scratch s(task);
  load_positions(task, s);
  clear_rows(s.total, task.num_rows(), s.pad);
  for (int64_t split = task.first_split; split < task.end_split; ++split) {
    merge_split<V>(task, s, partial_state(task, s, split), split);
  }
  write_rows<V>(task, s);
}

}  // namespace
}  // namespace minisgl
