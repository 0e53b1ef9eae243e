// What one instruction set supplies to attention: the kernels that attention.cpp cuts work for.
#pragma once

#include <cstdint>

#include "attention.h"

namespace minisgl {

// Every function in a header is inlined by force: the linker merges copies by name, and must not
// keep one that was compiled for an instruction set this machine lacks.
#define MINISGL_INLINE inline __attribute__((always_inline))

constexpr int64_t kVecLanes = 16;    // all kernels think in vectors of 16 floats
constexpr int64_t kMaxRows = 8;   // a micro-kernel takes at most so many rows at once
constexpr int64_t kMaxTileRows = 192;

MINISGL_INLINE int64_t padded_dim(int64_t dim) {
  return (dim + kVecLanes - 1) / kVecLanes * kVecLanes;
}

// Elements of a task's working memory: keys on their side as stored and as floats, values, scores
// and weights as codes, scales, and for each row query and its scale, output and state of the
// current split and of all splits so far.
MINISGL_INLINE int64_t scratch_floats(int64_t dim, int64_t rows) {
  return padded_dim(dim) * (3 * kKeyBlock + 3 * rows) + kKeyBlock * (2 * kMaxRows + 2) +
         kKeyBlock / 2 * kMaxRows + 6 * (rows + 2 * kVecLanes);
}

// A split's unmerged result: padded_dim floats a row, then their maxima, then their sums.
MINISGL_INLINE int64_t partial_floats(int64_t dim, int64_t rows) {
  return padded_dim(dim) * rows + 2 * padded_dim(rows);
}

// A tile of consecutive query tokens of one request, times the query heads of one KV head, over a
// range of splits. Row r of the tile is query r / group, head r % group.
struct AttentionTask {
  const AttentionShape* shape;
  const KVView* kv;
  const int32_t* locations;  // of the request, by position
  int64_t kv_head;
  int64_t num_queries;
  int64_t first_position;  // of the first query
  const float* q;          // first query, first head of the group
  int64_t q_stride;
  float* out;
  int64_t out_stride;
  int64_t first_split, end_split;
  float* partials;  // [split - partial_split][partial_floats]; null: finish the rows here
  int64_t partial_split;
  float* scratch;  // scratch_floats(), 64-byte aligned
  // The keys that this thread is likely to read next: fetched while the last block is computed.
  const int32_t* next_locations;
  int64_t next_keys, next_kv_head;

  MINISGL_INLINE int64_t group() const { return shape->num_q_heads / shape->num_kv_heads; }
  MINISGL_INLINE int64_t num_rows() const { return num_queries * group(); }
  MINISGL_INLINE int64_t row_position(int64_t row) const { return first_position + row / group(); }
  // The keys that a query at `position` sees: [low(position), position].
  MINISGL_INLINE int64_t low(int64_t position) const {
    return shape->window > 0 && position >= shape->window ? position - shape->window + 1 : 0;
  }
};

// Tokens [begin, end) of a store; `offset` is where the row's heads start.
struct AttentionKernels {
  void (*run[kNumKvKinds])(const AttentionTask& task);
  void (*merge)(const AttentionTask& task);  // the partials of [first_split, end_split) to out
  void (*store[kNumKvKinds])(const AttentionShape& shape, const KVStore& kv, const float* k,
                             int64_t k_stride, const float* v, int64_t v_stride,
                             const int32_t* out_loc, int64_t tokens);
  void (*rope[kNumKvKinds])(const AttentionShape& shape, const KVStore& kv, const RopeStore& work);
  // The ceiling: `steps` fused multiply-adds on each of `probe_floats` in registers.
  float (*probe)(int64_t steps);
  int64_t probe_floats;
};

const AttentionKernels& attention_kernels_portable();
const AttentionKernels& attention_kernels_neon();
const AttentionKernels& attention_kernels_avx2();
const AttentionKernels& attention_kernels_avx512();

}  // namespace minisgl
