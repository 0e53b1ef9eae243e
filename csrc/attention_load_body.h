// A block of keys and values: what a task keeps of it and how it is read; part of attention_body.h.
#pragma once

#include <cstring>

#include "attention_element.h"

namespace minisgl {
namespace {

constexpr int64_t kKeyVecs = kKeyBlock / kVecLanes;
constexpr int64_t kKeyPairs = kKeyBlock / 2;
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
// kStored: what keys and values are when rows read them, floats if they lie widened in scratch: all
// kinds share what is compiled for widened ones.
template <KvKind kStored>
struct KeyBlock {
  int64_t base;        // absolute position of the block's first key
  int64_t begin, end;  // what the tile sees of it
  bool full;           // every row sees every key
  const typename Element<kStored>::Type* keys;  // on their side: [column][64 keys]
  const typename Element<kStored>::Type* values[kKeyBlock];
};

// Working memory of a task, cut from AttentionTask::scratch. Over codes, queries and turned hold
// codes, values packed pairs; keys are rows that needed widening or padding.
struct Scratch {
  float *queries, *turned, *keys, *values, *scores;
  float *q_scale, *k_scale, *v_scale;  // of each row, of each key of the block
  Pair* weights;                       // codes of what scores have become: [row][32 pairs]
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
    scores = take(2 * kMaxRows * kKeyBlock);  // over codes, of two groups of rows in turns
    weights = reinterpret_cast<Pair*>(take(kMaxRows * kKeyPairs));
    q_scale = take(whole + kVecLanes);
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

MINISGL_INLINE void prefetch_bytes(const void* row, int64_t bytes) {
  const char* p = static_cast<const char*>(row);
  __builtin_prefetch(p);
  for (int64_t i = 64; i < bytes; i += 64) __builtin_prefetch(p + i);
}

// Turns keys [begin, end) of the block, and neighbours: out[column * 64 + key]. A column is an
// element or a pair of codes. Between the pieces of work the values of the block, value_bytes each,
// are fetched, a few at a time.
template <class V, class T, class Value>
void turn_keys(const T* const* rows, int64_t dim, int64_t begin, int64_t end, T* out,
               const Value* const* values, int64_t value_bytes) {
  constexpr int64_t kKeys = V::kTurned / static_cast<int64_t>(sizeof(T));
  constexpr int64_t kColumns = 16 / static_cast<int64_t>(sizeof(T));
  const int64_t fetched = (kKeys * kColumns + dim - 1) / dim;  // values in each piece of work
  for (int64_t g = begin / kKeys * kKeys; g < end; g += kKeys) {
    const int64_t last = min64(end, g + kKeys);
    int64_t d = 0, next = max64(begin, g);
    for (; d + kColumns <= dim; d += kColumns) {
      V::turn(rows + g, d, out + d * kKeyBlock + g);
      const int64_t until = min64(last, next + fetched);
      for (; next < until; ++next) prefetch_bytes(values[next], value_bytes);
    }
    for (; next < last; ++next) prefetch_bytes(values[next], value_bytes);
    for (; d < dim; ++d) {
      for (int64_t j = g; j < g + kKeys; ++j) out[d * kKeyBlock + j] = rows[j][d];
    }
  }
}

// The keys that are needed after this block: one is fetched for every value that is read, so that
// neither waits for the other.
struct NextKeys {
  const char* first;  // at location 0
  const int32_t* locations;
  int64_t count, stride, bytes;

  MINISGL_INLINE void fetch(int64_t j) const {
    prefetch_bytes(first + locations[j] * stride, bytes);
  }
  MINISGL_INLINE void fetch_two(int64_t j) const {
    if (j < count) fetch(j);
    if (j + 1 < count) fetch(j + 1);
  }
};

// Reads keys [begin, end) of the block and prepares its values; floats of any size.
template <class V, KvKind kKind, KvKind kStored>
void load_block(const AttentionTask& task, const Scratch& s, const NextKeys&,
                KeyBlock<kStored>* block) {
  using T = typename Element<kKind>::Type;
  const KVView& kv = *task.kv;
  const int64_t dim = task.shape->head_dim, begin = block->begin, end = block->end;
  const T* k = static_cast<const T*>(kv.k) + task.kv_head * dim;
  const T* v = static_cast<const T*>(kv.v) + task.kv_head * dim;
  const int32_t* locations = task.locations + block->base;
  const T *keys[kKeyBlock], *values[kKeyBlock];
  for (int64_t j = begin; j < end; ++j) {
    const int64_t location = locations[j];
    keys[j] = k + location * kv.token_stride;
    values[j] = v + location * kv.token_stride;
  }
  // Keys are turned many at a time; where no row looks, any readable key will do.
  for (int64_t j = 0; j < begin; ++j) keys[j] = keys[begin];
  for (int64_t j = end; j < kKeyBlock; ++j) keys[j] = keys[begin];
  auto* turned = reinterpret_cast<T*>(s.turned);
  turn_keys<V>(keys, dim, begin, end, turned, values, dim * static_cast<int64_t>(sizeof(T)));
  if constexpr (kStored == kKind) {
    block->keys = turned;
  } else {
    block->keys = s.keys;
    for (int64_t i = 0; i < dim * kKeyBlock; i += kVecLanes) {
      V::store(s.keys + i, load_element<V, kKind>(turned + i));
    }
  }
  if constexpr (kStored == kKind) {
    if (dim % kVecLanes == 0) {  // whole vectors are read where they lie
      for (int64_t j = begin; j < end; ++j) block->values[j] = values[j];
      return;
    }
  }
  if constexpr (kStored == KvKind::kFloat32) {
    for (int64_t j = begin; j < end; ++j) {
      block->values[j] = s.values + j * s.pad;
      widen_row<V, kKind>(values[j], dim, s.values + j * s.pad);
    }
  }
}

}  // namespace
}  // namespace minisgl
