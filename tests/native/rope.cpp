// Norm, rotation and storing, and storing alone, into every kind of KV.
#include <algorithm>

#include "attention.h"
#include "kv_pool.h"
#include "test.h"

namespace minisgl_test {
namespace {

struct Case {
  AttentionShape shape;
  int64_t tokens, gap, locations;
  std::vector<int32_t> out_loc;  // all different
  bool odd;
  std::string what;

  Case(Random& random, KvKind kind, int64_t dim) {
    shape.head_dim = dim;
    shape.num_kv_heads = random.between(1, 3);
    shape.num_q_heads = shape.num_kv_heads * random.between(1, 3);
    shape.scale = 1;
    shape.window = 0;
    tokens = random.between(1, 40);
    gap = random.between(0, 3);
    locations = tokens + 5;
    odd = random.one_in(3);
    const int64_t first = random.between(0, locations - 1);
    for (int64_t t = 0; t < tokens; ++t) {
      out_loc.push_back(static_cast<int32_t>((first + t) % locations));
    }
    std::reverse(out_loc.begin(), out_loc.end());
    what = text("kind ", static_cast<int>(kind), ", heads ", shape.num_q_heads, "/",
                shape.num_kv_heads, " of ", dim, ", ", tokens, " tokens", odd ? ", odd" : "");
  }

  Floats values(Random& random, int64_t count) const {
    Floats x = random.normals(count);
    for (float& value : x) {
      if (random.one_in(9)) value *= std::ldexp(1.0f, static_cast<int>(random.between(-30, 14)));
      if (odd && random.one_in(97)) value = random.strange();
    }
    return x;
  }
};

void test_store(Family& family, Random& random, KvKind kind, int64_t dim) {
  const Case c(random, kind, dim);
  const int64_t width = c.shape.num_kv_heads * dim, stride = width + c.gap;
  const Floats k = c.values(random, (c.tokens - 1) * stride + width);
  const Floats v = c.values(random, (c.tokens - 1) * stride + width);
  same_everywhere(family, "store, " + c.what, [&] {
    KvPool pool(kind, c.shape, c.locations, c.gap);
    store_kv(c.shape, pool.store(), k.data(), stride, v.data(), stride, c.out_loc.data(), c.tokens);
    return pool.all();
  });
  if (c.odd) return;
  // What is stored is near: 8 or 13 bits of the largest of its head, or the bits of its type.
  KvPool pool(kind, c.shape, c.locations, c.gap);
  store_kv(c.shape, pool.store(), k.data(), stride, v.data(), stride, c.out_loc.data(), c.tokens);
  for (int64_t i = 0; i < c.tokens * width; ++i) {
    const int64_t t = i / width, head = i % width / dim;
    const float* x = v.data() + t * stride + head * dim;
    float largest = 0;
    for (int64_t d = 0; d < dim; ++d) largest = std::fmax(largest, std::fabs(x[d]));
    const float wanted = x[i % dim];
    const float error = std::fabs(pool.get(1, c.out_loc[t], head, i % dim) - wanted);
    const float codes = 2 * static_cast<float>(largest_code(kind));
    const float bound = has_scales(kind)            ? largest / codes * 1.001f
                        : kind == KvKind::kFloat32  ? 0.0f
                        : kind == KvKind::kBfloat16 ? std::fabs(wanted) / 256
                                                    : std::fabs(wanted) / 2048 + 0x1p-25f;
    family.check(error <= bound, "store, " + c.what + ": too far off");
  }
}

// One head by the definition.
void turn(float* x, int64_t dim, const float* norm, float eps, const float* cos, const float* sin,
          int64_t half) {
  if (norm != nullptr) {
    float part[16] = {};
    for (int64_t i = 0; i < dim; ++i) part[i % 16] += x[i] * x[i];
    for (int step = 8; step > 0; step /= 2) {
      for (int i = 0; i < step; ++i) part[i] += part[i + step];
    }
    const float scale = 1.0f / std::sqrt(part[0] / static_cast<float>(dim) + eps);
    for (int64_t i = 0; i < dim; ++i) x[i] = x[i] * scale * norm[i];
  }
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cos[i] - second * sin[i];
    x[i + half] = second * cos[i] + first * sin[i];
  }
}

void test_rotation(Family& family, Random& random, KvKind kind, int64_t dim) {
  const Case c(random, kind, dim);
  const int64_t num_q = c.shape.num_q_heads, num_kv = c.shape.num_kv_heads;
  const int64_t width = (num_q + 2 * num_kv) * dim, stride = width + c.gap;
  const Floats qkv = c.values(random, (c.tokens - 1) * stride + width);
  RopeStore work;
  work.tokens = c.tokens;
  work.stride = stride;
  work.half = random.between(0, dim / 2);
  work.eps = 1e-6f;
  work.out_loc = c.out_loc.data();
  const bool named = random.one_in(2);
  std::vector<int32_t> positions;
  for (int64_t t = 0; t < c.tokens; ++t) {
    positions.push_back(static_cast<int32_t>(named ? random.between(0, c.tokens - 1) : t));
  }
  work.positions = named ? positions.data() : nullptr;
  const Floats cos = random.normals(c.tokens * work.half);
  const Floats sin = random.normals(c.tokens * work.half);
  const Floats q_norm = random.normals(dim), k_norm = random.normals(dim);
  work.cos = cos.data();
  work.sin = sin.data();
  work.q_norm = random.one_in(2) ? q_norm.data() : nullptr;
  work.k_norm = random.one_in(2) ? k_norm.data() : nullptr;
  const auto run = [&](KvKind as) {
    Floats row = qkv;
    KvPool pool(as, c.shape, c.locations, c.gap);
    work.qkv = row.data();
    rope_and_store(c.shape, pool.store(), work);
    const Floats stored = pool.all();
    row.insert(row.end(), stored.begin(), stored.end());
    return row;
  };
  const Floats result = same_everywhere(family, "rope, " + c.what, [&] { return run(kind); });
  Floats wanted = qkv;
  KvPool pool(KvKind::kFloat32, c.shape, c.locations, c.gap);
  for (int64_t t = 0; t < c.tokens; ++t) {
    float* row = wanted.data() + t * stride;
    const float* cosines = cos.data() + positions[t] * work.half;
    const float* sines = sin.data() + positions[t] * work.half;
    for (int64_t h = 0; h < num_q; ++h) {
      turn(row + h * dim, dim, work.q_norm, work.eps, cosines, sines, work.half);
    }
    for (int64_t h = 0; h < num_kv; ++h) {
      const float* k = row + (num_q + h) * dim;
      Floats turned(k, k + dim);
      turn(turned.data(), dim, work.k_norm, work.eps, cosines, sines, work.half);
      for (int64_t d = 0; d < dim; ++d) {
        pool.set(0, c.out_loc[t], h, d, turned[d]);
        pool.set(1, c.out_loc[t], h, d, k[num_kv * dim + d]);
      }
    }
  }
  const Floats changed(result.begin(), result.begin() + static_cast<int64_t>(wanted.size()));
  family.expect_equal(wanted, changed, "rope, " + c.what + ": the queries by the definition");
  if (kind != KvKind::kFloat32) return;
  const Floats stored(result.begin() + static_cast<int64_t>(wanted.size()), result.end());
  family.expect_equal(pool.all(), stored, "rope, " + c.what + ": the pages by the definition");
}

}  // namespace

void test_rope(Family& family) {
  Random random(6);
  for (const int64_t dim : {1, 2, 15, 16, 17, 32, 48, 64, 80, 100, 128}) {
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i < kNumKvKinds; ++i) {
        test_store(family, random, static_cast<KvKind>(i), dim);
        test_rotation(family, random, static_cast<KvKind>(i), dim);
      }
    }
  }
}

}  // namespace minisgl_test
