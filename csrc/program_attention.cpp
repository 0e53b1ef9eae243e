// The attention step of a program.
#include <stdexcept>

#include "program.h"

namespace minisgl {
namespace {

[[noreturn]] void fail(const char* what) { throw std::invalid_argument(what); }

}  // namespace

void Program::attention(int qkv, int out, const AttentionParams& params) {
  const AttentionShape& shape = params.shape;
  const int64_t dim = shape.head_dim, num_q = shape.num_q_heads, num_kv = shape.num_kv_heads;
  constexpr int64_t kMaxHeads = 1 << 16;
  if (in_tail()) fail("attention needs all tokens");
  if (num_kv < 1 || num_q < 1 || num_q > kMaxHeads || num_q % num_kv != 0) {
    fail("the query heads must be a multiple of the KV heads");
  }
  if (dim < 1 || dim > kMaxHeadDim || params.half < 0 || 2 * params.half > dim) {
    fail("bad size of a head");
  }
  if (shape.window < 0 || params.kv.token_stride < num_kv * dim) fail("bad window or stride");
  const int64_t stride = (num_q + 2 * num_kv) * dim;
  if (width(qkv) != stride || width(out) != num_q * dim) fail("heads and buffers do not match");
  const int64_t bytes = params.kv.token_stride * (params.kv.kind == KvKind::kFloat32 ? 4 : params.kv.kind == KvKind::kInt8 ? 1 : 2);
  commit_->add(params.kv.k, bytes);
  commit_->add(params.kv.v, bytes);
  commit_->add(params.kv.k_scale, num_kv * static_cast<int64_t>(sizeof(float)));
  commit_->add(params.kv.v_scale, num_kv * static_cast<int64_t>(sizeof(float)));
  add_whole_step("rope", 0, [=](const Tile& tile) {
    RopeStore work;
    work.tokens = tile.rows;
    work.qkv = at(qkv);
    work.stride = stride;
    work.cos = params.cos;
    work.sin = params.sin;
    work.positions = tile.positions;
    work.half = params.half;
    work.q_norm = params.q_norm;
    work.k_norm = params.k_norm;
    work.eps = params.eps;
    work.out_loc = tile.out_loc;
    rope_and_store(params.shape, params.kv, work);
  });
  add_whole_step("attention", 0, [=](const Tile& tile) {
    const KVView view{params.kv.kind,         params.kv.k,       params.kv.v,
                      params.kv.token_stride, params.kv.k_scale, params.kv.v_scale};
    paged_attention(*tile.requests, params.shape, view, at(qkv), stride, at(out), num_q * dim);
  });
}

}  // namespace minisgl
