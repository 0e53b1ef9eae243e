// Paged attention over float queries, and what stores keys and values into the pages.
//
// A token location is a row of the KV pool: the key of location t and head h starts at element
// t * token_stride + h * head_dim. `rows` says where the tokens of a request lie. Exactly the
// positions [0, kv_len) of a request are read: a slot beyond them may hold anything.
//
// One (query, head) gives the same bits alone and among others, whatever the chunks of the prompt,
// the page size, the number of threads or the instruction set:
//   a score is one chain of fused multiply-adds over the columns, from 0, of the query times scale;
//   over codes it is the exact dot product of codes, times the key's scale, times the query's;
//   blocks of 64 keys and splits of 256 lie at absolute positions, counted from position 0;
//   inside a split blocks follow each other (online softmax), and the output is a chain over keys,
//   over codes a chain over blocks of exact sums of weights' codes times values' codes;
//   the splits are merged in order, whether one thread or many computed them.
// A query never touches a key that it does not see, not even with a weight of 0.
#pragma once

#include <cstdint>

namespace minisgl {

enum class KvKind : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3, kInt16 = 4 };
constexpr int kNumKvKinds = 5;

constexpr bool has_scales(KvKind kind) { return kind == KvKind::kInt8 || kind == KvKind::kInt16; }
// Codes lie in [-largest_code, largest_code]; other numbers in the pool give wrong sums.
constexpr int32_t largest_code(KvKind kind) { return kind == KvKind::kInt8 ? 127 : 4095; }

constexpr int64_t kKeyBlock = 64;
constexpr int64_t kKeySplit = 256;
constexpr int64_t kMaxHeadDim = 1024;

// Integers: value = code * scale, one scale per location and head, at [location * heads + head].
struct KVView {
  KvKind kind;
  const void* k;
  const void* v;
  int64_t token_stride;  // elements between token locations
  const float* k_scale = nullptr;
  const float* v_scale = nullptr;
};

struct KVStore {
  KvKind kind;
  void* k;
  void* v;
  int64_t token_stride;
  float* k_scale = nullptr;
  float* v_scale = nullptr;
};

// The queries of request r are the token rows [query_start[r], query_start[r + 1]); the last one
// stands at position kv_len[r] - 1. rows[r * row_stride + position] is a token location.
struct AttentionBatch {
  int64_t num_reqs;
  const int32_t* query_start;
  const int32_t* kv_len;
  const int32_t* rows;
  int64_t row_stride;
};

struct AttentionShape {
  int64_t num_q_heads, num_kv_heads, head_dim;
  float scale;
  int64_t window;  // how many tokens back a query sees, itself included; 0: all
};

// out[t][h] = softmax(scale * q[t][h] . K) . V for every query token; heads are contiguous, strides
// are between tokens. Throws std::bad_alloc.
void paged_attention(const AttentionBatch& batch, const AttentionShape& shape, const KVView& kv,
                     const float* q, int64_t q_stride, float* out, int64_t out_stride);

// Stores k[t] and v[t] (num_kv_heads * head_dim floats each) at location out_loc[t].
void store_kv(const AttentionShape& shape, const KVStore& kv, const float* k, int64_t k_stride,
              const float* v, int64_t v_stride, const int32_t* out_loc, int64_t tokens);

// The rows of a merged projection: q heads, then k heads, then v heads. Each q and k head is normed
// (RMS over the head, where a weight is given) and its first 2 * half columns are turned: column i
// is paired with column i + half. q is changed in place; k and v go to the pages and the row keeps
// k and v as they were.
struct RopeStore {
  int64_t tokens;
  float* qkv;
  int64_t stride;
  const float* cos;  // rows of `half` floats
  const float* sin;
  const int32_t* positions;  // of each token, the row of cos and sin; null: row t for token t
  int64_t half;
  const float* q_norm;  // head_dim weights, or null
  const float* k_norm;
  float eps;
  const int32_t* out_loc;
};

void rope_and_store(const AttentionShape& shape, const KVStore& kv, const RopeStore& work);

// Float operations per second in registers (a multiply-add counts as two), with the instruction set
// and the threads in force; the best of `repeats`.
double probe_float(int64_t steps, int repeats);

}  // namespace minisgl
