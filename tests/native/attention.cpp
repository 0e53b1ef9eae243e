// Paged attention over every kind of KV: decode, prefill and both at once, windows, odd head sizes.
// Unused slots of the pool hold NaNs: reading one would show.
#include "attention.h"

#include <algorithm>

#include "kv_pool.h"
#include "test.h"

namespace minisgl_test {
namespace {

struct Requests {
  std::vector<int32_t> query_start{0}, kv_len, rows;
  int64_t row_stride = 0;

  int64_t count() const { return static_cast<int64_t>(kv_len.size()); }
  int64_t tokens() const { return query_start.back(); }
  AttentionBatch batch() const {
    return {count(), query_start.data(), kv_len.data(), rows.data(), row_stride};
  }
};

// Requests with locations scattered over a pool that is twice as large.
Requests make_requests(Random& random, int64_t longest, int64_t locations) {
  Requests result;
  const int64_t count = random.between(1, 3);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t length = random.between(1, longest);
    const int64_t queries = random.one_in(2) ? 1 : random.between(1, std::min<int64_t>(length, 40));
    result.kv_len.push_back(static_cast<int32_t>(length));
    result.query_start.push_back(static_cast<int32_t>(result.tokens() + queries));
    result.row_stride = std::max(result.row_stride, length + random.between(0, 2));
  }
  std::vector<int32_t> free;
  for (int64_t i = 0; i < locations; ++i) free.push_back(static_cast<int32_t>(i));
  result.rows.assign(static_cast<size_t>(count * result.row_stride), INT32_MAX);
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t p = 0; p < result.kv_len[r]; ++p) {
      const int64_t at = random.between(0, static_cast<int64_t>(free.size()) - 1);
      result.rows[r * result.row_stride + p] = free[at];
      free[at] = free.back();
      free.pop_back();
    }
  }
  return result;
}

// softmax(scale * q . K) . V of one query and head, in double precision.
std::vector<double> written_out(const AttentionShape& shape, const KvPool& pool, const int32_t* row,
                                int64_t position, int64_t kv_head, const float* q) {
  const int64_t low = shape.window > 0 ? std::max<int64_t>(0, position - shape.window + 1) : 0;
  std::vector<double> scores, out(static_cast<size_t>(shape.head_dim));
  double most = -1e300, sum = 0;
  for (int64_t p = low; p <= position; ++p) {
    double score = 0;
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      score += static_cast<double>(q[d]) * pool.get(0, row[p], kv_head, d);
    }
    scores.push_back(score * shape.scale);
    most = std::max(most, scores.back());
  }
  for (int64_t p = low; p <= position; ++p) {
    const double weight = std::exp(scores[p - low] - most);
    sum += weight;
    for (int64_t d = 0; d < shape.head_dim; ++d) out[d] += weight * pool.get(1, row[p], kv_head, d);
  }
  for (double& value : out) value /= sum;
  return out;
}

void check(Family& family, const std::string& what, const AttentionShape& shape, const KvPool& pool,
           const Requests& requests, const Floats& q, int64_t q_stride, const Floats& out,
           int64_t out_stride) {
  const int64_t group = shape.num_q_heads / shape.num_kv_heads, dim = shape.head_dim;
  for (int64_t r = 0; r < requests.count(); ++r) {
    const int64_t first = requests.query_start[r], end = requests.query_start[r + 1];
    for (int64_t t : {first, end - 1}) {
      const int64_t position = requests.kv_len[r] - (end - t), head = t % shape.num_q_heads;
      const std::vector<double> wanted =
          written_out(shape, pool, requests.rows.data() + r * requests.row_stride, position,
                      head / group, q.data() + t * q_stride + head * dim);
      for (int64_t d = 0; d < dim; ++d) {
        const double error = std::fabs(out[t * out_stride + head * dim + d] - wanted[d]);
        // Over codes, queries and weights are rounded to 11 to 13 bits.
        const double bound = has_scales(pool.kind()) ? 4e-3 : 2e-5;
        family.check(error < bound, what + ": far from attention written out");
      }
    }
  }
  for (int64_t t = 0; t + 1 < requests.tokens(); ++t) {
    for (int64_t i = shape.num_q_heads * dim; i < out_stride; ++i) {
      family.check(out[t * out_stride + i] == kMark, what + ": wrote between the tokens");
    }
  }
}

void test_one(Family& family, Random& random, KvKind kind, int64_t dim, int64_t longest) {
  AttentionShape shape;
  shape.head_dim = dim;
  shape.num_kv_heads = random.between(1, 2);
  shape.num_q_heads = shape.num_kv_heads * random.between(1, 5);
  shape.scale = 1.0f / std::sqrt(static_cast<float>(dim));
  shape.window = random.one_in(2) ? random.between(1, longest) : 0;
  const bool odd = random.one_in(4);
  const Requests requests = make_requests(random, longest, 6 * longest);
  KvPool pool(kind, shape, 6 * longest, random.between(0, 5));
  for (int64_t r = 0; r < requests.count(); ++r) {
    for (int64_t p = 0; p < requests.kv_len[r]; ++p) {
      const int32_t location = requests.rows[r * requests.row_stride + p];
      for (int64_t i = 0; i < 2 * shape.num_kv_heads * dim; ++i) {
        const float value = odd && random.one_in(4999) ? random.strange() : random.normal();
        pool.set(static_cast<int>(i % 2), location, i / 2 / dim, i / 2 % dim, value);
      }
    }
  }
  const int64_t width = shape.num_q_heads * dim;
  const int64_t q_stride = width + random.between(0, 3), out_stride = width + random.between(0, 3);
  Floats q = random.normals((requests.tokens() - 1) * q_stride + width);
  for (float& value : q) {
    if (odd && random.one_in(997)) value = random.strange();
  }
  const std::string what =
      text("kind ", static_cast<int>(kind), ", heads ", shape.num_q_heads, "/", shape.num_kv_heads,
           " of ", dim, ", window ", shape.window, ", ", requests.tokens(), " tokens of ",
           requests.count(), " requests, ", odd ? "odd, " : "", "longest ", longest);
  const Floats out = same_everywhere(family, what, [&] {
    Floats result(static_cast<size_t>((requests.tokens() - 1) * out_stride + width), kMark);
    paged_attention(requests.batch(), shape, pool.view(), q.data(), q_stride, result.data(),
                    out_stride);
    return result;
  });
  if (!odd) check(family, what, shape, pool, requests, q, q_stride, out, out_stride);
}

}  // namespace

void test_attention(Family& family) {
  Random random(5);
  const int64_t dims[] = {1, 3, 16, 20, 32, 33, 64, 72, 80, 100, 128, 256};
  for (int i = 0; i < kNumKvKinds; ++i) {
    const KvKind kind = static_cast<KvKind>(i);
    for (const int64_t dim : dims) {
      for (const int64_t longest : {1, 20, 70}) test_one(family, random, kind, dim, longest);
      if (dim <= 33) test_one(family, random, kind, dim, 600);  // several splits
    }
  }
}

}  // namespace minisgl_test
