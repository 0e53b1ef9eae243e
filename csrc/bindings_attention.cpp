// Paged attention, storing keys and values, and the fused rotation. Addresses come from
// minisgl/kernel/native_attention.py, which has checked types, shapes and strides; what depends on
// the contents of arrays (locations, lengths) is checked here, before anything is read or written.
#include <algorithm>
#include <stdexcept>

#include "attention.h"
#include "bindings.h"

namespace nb = nanobind;

namespace minisgl {
namespace {

[[noreturn]] void fail(const char* what) { throw std::invalid_argument(what); }

AttentionShape make_shape(int64_t num_q, int64_t num_kv, int64_t dim, float scale, int64_t window) {
  constexpr int64_t kMaxHeads = 1 << 16;
  if (num_q < 1 || num_kv < 1 || num_q > kMaxHeads || num_q % num_kv != 0) {
    fail("the query heads must be a multiple of the KV heads");
  }
  if (dim < 1 || dim > kMaxHeadDim) fail("head_dim must be between 1 and 1024");
  if (window < 0) fail("the window must not be negative");
  return {num_q, num_kv, dim, scale, window};
}

// pool: (kind, k, v, token_stride, k_scale, v_scale, number of locations)
struct Pool {
  int kind;
  uint64_t k, v;
  int64_t token_stride;
  uint64_t k_scale, v_scale;
  int64_t num_locations;

  explicit Pool(const nb::tuple& t)
      : kind(nb::cast<int>(t[0])),
        k(nb::cast<uint64_t>(t[1])),
        v(nb::cast<uint64_t>(t[2])),
        token_stride(nb::cast<int64_t>(t[3])),
        k_scale(nb::cast<uint64_t>(t[4])),
        v_scale(nb::cast<uint64_t>(t[5])),
        num_locations(nb::cast<int64_t>(t[6])) {
    if (kind < 0 || kind >= kNumKvKinds) fail("no such kind of keys and values");
    if (has_scales(static_cast<KvKind>(kind)) && (k_scale == 0 || v_scale == 0)) {
      fail("integer keys and values need scales");
    }
  }
  KVView view() const {
    return {static_cast<KvKind>(kind), address<void>(k),       address<void>(v),
            token_stride,              address<float>(k_scale), address<float>(v_scale)};
  }
  KVStore store() const {
    return {static_cast<KvKind>(kind), address<void>(k),       address<void>(v),
            token_stride,              address<float>(k_scale), address<float>(v_scale)};
  }
  void check(const int32_t* locations, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      if (locations[i] < 0 || locations[i] >= num_locations) {
        throw std::out_of_range("a token location is outside of the KV pool");
      }
    }
  }
};

// Copies the first kv_len[r] locations of row index[r] of the page table to row r of `out`.
void snapshot_rows(uint64_t table, int64_t table_rows, int64_t table_stride, int64_t columns,
                   uint64_t indices, uint64_t kv_lens, int64_t count, uint64_t out,
                   int64_t out_stride, int64_t num_locations) {
  const auto* index = address<int32_t>(indices);
  const auto* kv_len = address<int32_t>(kv_lens);
  bool inside = true;
  {
    nb::gil_scoped_release release;
    for (int64_t r = 0; r < count; ++r) {
      const int64_t length = kv_len[r];
      if (index[r] < 0 || index[r] >= table_rows || length < 0 || length > columns ||
          length > out_stride) {
        throw std::out_of_range("a request lies outside of the page table");
      }
      const int32_t* from = address<int32_t>(table) + index[r] * table_stride;
      int32_t* to = address<int32_t>(out) + r * out_stride;
      uint32_t most = 0;  // a negative location is a very large one
      for (int64_t i = 0; i < length; ++i) {
        to[i] = from[i];
        most = std::max(most, static_cast<uint32_t>(from[i]));
      }
      inside = inside && (length == 0 || static_cast<int64_t>(most) < num_locations);
    }
  }
  if (!inside) throw std::out_of_range("a token location is outside of the KV pool");
}

// batch: (number of requests, query_start, kv_len, rows, row stride)
void attention(nb::tuple batch_tuple, nb::tuple pool_tuple, int64_t num_q, int64_t num_kv,
               int64_t dim, float scale, int64_t window, uint64_t q, int64_t q_stride, uint64_t out,
               int64_t out_stride, int64_t tokens) {
  const AttentionShape shape = make_shape(num_q, num_kv, dim, scale, window);
  const Pool pool(pool_tuple);
  const AttentionBatch batch{
      nb::cast<int64_t>(batch_tuple[0]), address<int32_t>(nb::cast<uint64_t>(batch_tuple[1])),
      address<int32_t>(nb::cast<uint64_t>(batch_tuple[2])),
      address<int32_t>(nb::cast<uint64_t>(batch_tuple[3])), nb::cast<int64_t>(batch_tuple[4])};
  int64_t start = 0;
  for (int64_t r = 0; r < batch.num_reqs; ++r) {
    const int64_t end = batch.query_start[r + 1], length = batch.kv_len[r];
    if (batch.query_start[r] != start || end < start || end > tokens) fail("bad query_start");
    if (length < end - start || length > batch.row_stride) fail("bad kv_len");
    start = end;
  }
  nb::gil_scoped_release release;
  paged_attention(batch, shape, pool.view(), address<float>(q), q_stride, address<float>(out),
                  out_stride);
}

void store(nb::tuple pool_tuple, int64_t num_kv, int64_t dim, uint64_t k, int64_t k_stride,
           uint64_t v, int64_t v_stride, uint64_t out_loc, int64_t tokens) {
  const AttentionShape shape = make_shape(num_kv, num_kv, dim, 1.0f, 0);
  const Pool pool(pool_tuple);
  nb::gil_scoped_release release;
  pool.check(address<int32_t>(out_loc), tokens);
  store_kv(shape, pool.store(), address<float>(k), k_stride, address<float>(v), v_stride,
           address<int32_t>(out_loc), tokens);
}

// table: (cos, sin, rows, half, positions or 0); norms: (q weights or 0, k weights or 0, eps)
void rope(nb::tuple pool_tuple, int64_t num_q, int64_t num_kv, int64_t dim, uint64_t qkv,
          int64_t stride, int64_t tokens, nb::tuple table, nb::tuple norms, uint64_t out_loc) {
  const AttentionShape shape = make_shape(num_q, num_kv, dim, 1.0f, 0);
  const Pool pool(pool_tuple);
  RopeStore work;
  work.tokens = tokens;
  work.qkv = address<float>(qkv);
  work.stride = stride;
  work.cos = address<float>(nb::cast<uint64_t>(table[0]));
  work.sin = address<float>(nb::cast<uint64_t>(table[1]));
  const int64_t table_rows = nb::cast<int64_t>(table[2]);
  work.half = nb::cast<int64_t>(table[3]);
  work.positions = address<int32_t>(nb::cast<uint64_t>(table[4]));
  work.q_norm = address<float>(nb::cast<uint64_t>(norms[0]));
  work.k_norm = address<float>(nb::cast<uint64_t>(norms[1]));
  work.eps = nb::cast<float>(norms[2]);
  work.out_loc = address<int32_t>(out_loc);
  if (work.half < 0 || 2 * work.half > dim) fail("cos and sin are wider than half a head");
  if (work.positions == nullptr && table_rows < tokens) fail("cos and sin have too few rows");
  nb::gil_scoped_release release;
  pool.check(work.out_loc, tokens);
  for (int64_t t = 0; work.positions != nullptr && t < tokens; ++t) {
    if (work.positions[t] < 0 || work.positions[t] >= table_rows) {
      throw std::out_of_range("a position is outside of the tables of cos and sin");
    }
  }
  rope_and_store(shape, pool.store(), work);
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("snapshot_rows", &snapshot_rows);
  m.def("paged_attention", &attention);
  m.def("store_kv", &store);
  m.def("rope_and_store", &rope);
  m.def("probe_float", [](int64_t steps, int repeats) {
    nb::gil_scoped_release release;
    return probe_float(steps, repeats);
  });
}

}  // namespace minisgl
