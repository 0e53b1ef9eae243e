// A task from its first split to its last: the loop over blocks, and the merging of splits.
#pragma once

#include "attention_body.h"

namespace minisgl {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr int64_t kRowsWorthPacking = 8;  // below, widened values would be read too few times

// What a row has gathered: columns [0, pad) of `out`, its maximum and its sum.
struct RowState {
  float* out;
  float* max;
  float* sum;
};

template <class V>
MINISGL_INLINE void merge_row(const RowState& total, const float* out, float max, float sum,
                              int64_t pad) {
  const float now = larger(max, *total.max);
  const float keep = exp2_one<V>(*total.max - now), add = exp2_one<V>(max - now);
  *total.max = now;
  *total.sum = __builtin_fmaf(sum, add, *total.sum * keep);
  const auto keep_vec = V::broadcast(keep), add_vec = V::broadcast(add);
  for (int64_t c = 0; c < pad; c += kVecLanes) {
    const auto kept = V::mul(V::load(total.out + c), keep_vec);
    V::store(total.out + c, V::fma(V::load(out + c), add_vec, kept));
  }
}

inline void clear_rows(float* out, float* max, float* sum, int64_t rows, int64_t pad) {
  std::memset(out, 0, static_cast<size_t>(rows * pad) * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) {
    max[r] = -__builtin_inff();
    sum[r] = 0.0f;
  }
}

// Whether a row sees a key of the split: rows that do not must not merge it.
inline bool row_in_split(const AttentionTask& task, int64_t row, int64_t split) {
  const int64_t position = task.row_position(row), base = split * kKeySplit;
  return position >= base && task.low(position) < base + kKeySplit;
}

template <class V>
void write_rows(const AttentionTask& task, const Scratch& s) {
  const int64_t dim = task.shape->head_dim, group = task.group();
  for (int64_t row = 0; row < task.num_rows(); ++row) {
    float* total = s.total_out + row * s.pad;
    const auto inverse = V::broadcast(1.0f / s.total_sum[row]);
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

template <class V, KvKind kKind>
void run_split(const AttentionTask& task, const Scratch& s, int64_t split) {
  using T = typename Element<kKind>::Type;
  const int64_t dim = task.shape->head_dim;
  const int64_t low = max64(task.low(task.first_position), split * kKeySplit);
  const int64_t high = min64(task.first_position + task.num_queries, (split + 1) * kKeySplit);
  const float scale = task.shape->scale * kLog2E;
  // Values can be read where they lie only if their rows are whole vectors.
  const bool whole = dim % kVecLanes == 0;
  const bool pack =
      !whole || (kKind != KvKind::kFloat32 && task.num_rows() > kRowsWorthPacking);
  clear_rows(s.split_out, s.split_max, s.split_sum, task.num_rows(), s.pad);
  KeyBlock<kKind> block;
  for (int64_t at = low / kKeyBlock * kKeyBlock; at < high; at += kKeyBlock) {
    block.base = at;
    block.begin = max64(low - at, 0);
    block.end = min64(high - at, kKeyBlock);
    load_block<V, kKind>(task, s, pack, &block);
    if (high > at + kKeyBlock) {
      const T* k = static_cast<const T*>(task.kv->k) + task.kv_head * dim;
      const int64_t next = min64(high - at, 2 * kKeyBlock);
      for (int64_t j = kKeyBlock; j < next; ++j) {
        prefetch_row(k + task.locations[at + j] * task.kv->token_stride, dim);
      }
    }
    if (pack) {
      block_all_rows<V, kKind, KvKind::kFloat32>(task, s, block, block.packed, 0, scale);
    } else {
      block_all_rows<V, kKind, kKind>(task, s, block, block.values, 0, scale);
    }
  }
}

template <class V, KvKind kKind>
void run_attention(const AttentionTask& task) {
  const Scratch s(task);
  const int64_t rows = task.num_rows();
  if (task.partials == nullptr) clear_rows(s.total_out, s.total_max, s.total_sum, rows, s.pad);
  for (int64_t split = task.first_split; split < task.end_split; ++split) {
    run_split<V, kKind>(task, s, split);
    const int64_t size = partial_floats(task.shape->head_dim);
    float* partial = nullptr;
    if (task.partials != nullptr) {
      partial = task.partials + (split - task.partial_split) * rows * size;
    }
    for (int64_t row = 0; row < rows; ++row) {
      const float* out = s.split_out + row * s.pad;
      if (partial != nullptr) {
        float* slot = partial + row * size;
        std::memcpy(slot, out, static_cast<size_t>(s.pad) * sizeof(float));
        slot[s.pad] = s.split_max[row];
        slot[s.pad + 1] = s.split_sum[row];
      } else if (row_in_split(task, row, split)) {
        const RowState total{s.total_out + row * s.pad, s.total_max + row, s.total_sum + row};
        merge_row<V>(total, out, s.split_max[row], s.split_sum[row], s.pad);
      }
    }
  }
  if (task.partials == nullptr) write_rows<V>(task, s);
}

template <class V>
void merge_partials(const AttentionTask& task) {
  const Scratch s(task);
  const int64_t rows = task.num_rows(), size = partial_floats(task.shape->head_dim);
  clear_rows(s.total_out, s.total_max, s.total_sum, rows, s.pad);
  for (int64_t split = task.first_split; split < task.end_split; ++split) {
    const float* partial = task.partials + (split - task.partial_split) * rows * size;
    for (int64_t row = 0; row < rows; ++row) {
      if (!row_in_split(task, row, split)) continue;
      const float* slot = partial + row * size;
      const RowState total{s.total_out + row * s.pad, s.total_max + row, s.total_sum + row};
      merge_row<V>(total, slot, slot[s.pad], slot[s.pad + 1], s.pad);
    }
  }
  write_rows<V>(task, s);
}

}  // namespace
}  // namespace minisgl
