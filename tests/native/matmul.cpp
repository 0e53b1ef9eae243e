// Packed products in every format, gated too, and float products in every kind, over ragged shapes.
#include "matmul.h"

#include <memory>

#include "elementwise.h"
#include "pack.h"
#include "test.h"
#include "weights.h"

namespace minisgl_test {
namespace {

// What the packed product of `weights` with x gives, each in a matrix with gaps, one after another.
Floats packed_product(const Floats& x, int64_t tokens, int64_t columns, int64_t x_stride,
                      const std::vector<PackedWeight>& weights, int64_t gap) {
  Activations activations(tokens, columns);
  activations.quantize(x.data(), x_stride);
  std::vector<Floats> outs;
  std::vector<PackedJob> jobs;
  for (const PackedWeight& weight : weights) {
    const int64_t stride = weight.view.rows + gap;
    outs.emplace_back(static_cast<size_t>((tokens - 1) * stride + weight.view.rows), kMark);
    jobs.push_back({&activations, weight.view, outs.back().data(), stride});
  }
  matmul_packed(jobs.data(), static_cast<int64_t>(jobs.size()));
  Floats all;
  for (const Floats& out : outs) all.insert(all.end(), out.begin(), out.end());
  return all;
}

// By how much a scale that is rounded to an integer, once more for a token, may move a product.
double rounding_bound(const PackedWeight& weight, int64_t row, double largest) {
  if (!info(weight.view.format).has_unit) return 0;
  float unit;
  std::memcpy(&unit, weight.view.data + (row / kPanelRows + 1) * weight.view.panel_bytes() -
                         4 * (kPanelRows - row % kPanelRows), 4);
  constexpr double kLargestSum = 8 * 127 * kGroup + 1, kRounding = 1.3;
  const auto groups = static_cast<double>(weight.view.groups());
  return groups * kLargestSum * kRounding * std::fabs(unit) * largest / 127;
}

// Against a sum in double precision of what was unpacked and what the quantisation left of x.
void check_packed(Family& family, const std::string& what, const Floats& product, const Floats& x,
                  int64_t tokens, int64_t columns, int64_t x_stride, const PackedWeight& weight,
                  int64_t gap) {
  set_isa(Isa::kPortable);
  std::vector<PackedWeight> itself;
  itself.push_back(identity(columns));
  const Floats seen = packed_product(x, tokens, columns, x_stride, itself, 0);
  const int64_t rows = weight.view.rows, stride = rows + gap;
  Floats w(static_cast<size_t>(columns));
  for (int64_t row = 0; row < rows; ++row) {
    unpack_row(weight.view, row, w.data());
    for (int64_t t = 0; t < tokens; ++t) {
      double sum = 0, size = 0, largest = 0;
      for (int64_t k = 0; k < columns; ++k) {
        const double term = static_cast<double>(w[k]) * seen[t * columns + k];
        sum += term;
        size += std::fabs(term);
        largest = std::fmax(largest, std::fabs(seen[t * columns + k]));
      }
      const double error = std::fabs(product[t * stride + row] - sum);
      const double bound = 1e-5 * (size + 1) + rounding_bound(weight, row, largest);
      family.check(error <= bound, what + ": far from the sum in double precision");
    }
  }
  for (int64_t t = 0; t + 1 < tokens; ++t) {
    for (int64_t i = rows; i < stride; ++i) {
      family.check(product[t * stride + i] == kMark, what + ": wrote between the tokens");
    }
  }
}

void test_packed(Family& family, Random& random, Format format, int64_t tokens) {
  // Within a span of groups, and over several, the last one whole or not.
  const int64_t columns = random.between(1, random.one_in(2) ? 3 * kSpan * kGroup : 200);
  const int64_t x_stride = columns + random.between(0, 3), gap = random.between(0, 3);
  const bool odd = random.one_in(4), extreme = !odd && random.one_in(4);
  std::vector<PackedWeight> weights;
  for (int64_t i = random.between(0, 2); i >= 0; --i) {
    const Format other = static_cast<Format>(random.between(0, kNumFormats - 1));
    const Format which = weights.empty() ? format : other;
    weights.push_back(random_weight(random, which, random.between(1, 90), columns, odd, extreme));
  }
  Floats x = random.normals((tokens - 1) * x_stride + columns);
  for (float& value : x) {
    if (odd && random.one_in(97)) value = random.strange();
    if (extreme) value = random.one_in(2) ? 3.0f : -3.0f;
  }
  const std::string what = text(info(format).name, ", ", tokens, " tokens, ", columns,
                                " columns, ", weights[0].view.rows, " rows");
  const Floats product = same_everywhere(family, what, [&] {
    return packed_product(x, tokens, columns, x_stride, weights, gap);
  });
  if (!odd) check_packed(family, what, product, x, tokens, columns, x_stride, weights[0], gap);
}

// Several products of different activations in one go, as experts have them, more than there may be
// in one region, against one after the other.
void test_many(Family& family, Random& random, int64_t num_jobs) {
  const int64_t columns = kGroup * random.between(1, 4), rows = kGroup * random.between(1, 3);
  std::vector<PackedWeight> gates, ups, downs;
  std::vector<int64_t> tokens;
  std::vector<Floats> x;
  for (int64_t i = 0; i < num_jobs; ++i) {
    const auto any = [&] { return static_cast<Format>(random.between(0, kNumFormats - 1)); };
    tokens.push_back(random.one_in(5) ? random.between(1, 100) : random.between(1, 4));
    x.push_back(random.normals(tokens.back() * columns));
    gates.push_back(random_weight(random, any(), rows, columns, false));
    ups.push_back(random_weight(random, any(), rows, columns, false));
    downs.push_back(random_weight(random, any(), columns, rows, false));
  }
  const std::string what = text("many, ", num_jobs, " jobs, ", columns, " columns, ", rows, " rows");
  same_everywhere(family, what, [&] {
    const GateFn combine = elementwise_kernels().gate_mul[0];
    std::vector<std::unique_ptr<Activations>> inputs, hidden;
    std::vector<Floats> outs;
    std::vector<GatedJob> gated;
    std::vector<PackedJob> packed;
    for (size_t i = 0; i < tokens.size(); ++i) {
      inputs.push_back(std::make_unique<Activations>(tokens[i], columns));
      inputs[i]->quantize(x[i].data(), columns);
      hidden.push_back(std::make_unique<Activations>(tokens[i], rows));
      outs.emplace_back(static_cast<size_t>(tokens[i] * columns), kMark);
      gated.push_back({inputs[i].get(), gates[i].view, ups[i].view, hidden[i].get()});
      packed.push_back({hidden[i].get(), downs[i].view, outs[i].data(), columns});
    }
    matmul_gated(gated.data(), num_jobs, combine);
    matmul_packed(packed.data(), num_jobs);
    Floats together, apart;
    for (const Floats& out : outs) together.insert(together.end(), out.begin(), out.end());
    for (size_t i = 0; i < tokens.size(); ++i) {
      matmul_gated(&gated[i], 1, combine);
      matmul_packed(&packed[i], 1);
      apart.insert(apart.end(), outs[i].begin(), outs[i].end());
    }
    family.expect_equal(apart, together, what + " against one after the other");
    return together;
  });
}

// Gate, up, their product and its quantisation in one go, against one after the other.
void test_gated(Family& family, Random& random, int64_t tokens) {
  const bool tall = random.one_in(4);  // a task has more groups than it combines at once
  const int64_t columns = random.between(1, tall ? 40 : 200);
  const int64_t x_stride = columns + random.between(0, 3);
  const int64_t rows = kGroup * (tall ? random.between(60, 90) : random.between(1, 5));
  const bool odd = random.one_in(4);
  const auto any = [&] { return static_cast<Format>(random.between(0, kNumFormats - 1)); };
  PackedWeight gate = random_weight(random, any(), rows, columns, odd);
  PackedWeight up = random_weight(random, any(), rows, columns, odd);
  Floats x = random.normals((tokens - 1) * x_stride + columns);
  for (float& value : x) {
    if (odd && random.one_in(997)) value = random.strange();
  }
  const int kind = static_cast<int>(random.between(0, kNumActivations - 1));
  const std::string what = text("gated, ", tokens, " tokens, ", columns, " columns, ", rows,
                                " rows of ", info(gate.view.format).name, " and ",
                                info(up.view.format).name);
  same_everywhere(family, what, [&] {
    const GateFn combine = elementwise_kernels().gate_mul[kind];
    Activations input(tokens, columns), joint(tokens, rows), steps(tokens, rows);
    input.quantize(x.data(), x_stride);
    const GatedJob gated{&input, gate.view, up.view, &joint};
    matmul_gated(&gated, 1, combine);
    Floats a(static_cast<size_t>(tokens * rows)), b(a.size());
    const PackedJob jobs[] = {{&input, gate.view, a.data(), rows}, {&input, up.view, b.data(), rows}};
    matmul_packed(jobs, 2);
    for (int64_t at = 0; at < tokens * rows; at += rows) {
      combine(a.data() + at, b.data() + at, rows, a.data() + at);
    }
    steps.quantize(a.data(), rows);
    const Floats result = contents(joint);
    family.expect_equal(contents(steps), result, what + " against one step after the other");
    return result;
  });
}

// The definition: 16 partial sums, lane i with i + 8, then i + 4, i + 2, i + 1.
float dot_twin(const Floats& weight, int64_t at, const float* x, int64_t columns) {
  float lane[16] = {};
  for (int64_t k = 0; k < columns; ++k) lane[k % 16] = std::fma(weight[at + k], x[k], lane[k % 16]);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

void test_float(Family& family, Random& random, FloatKind kind, int64_t tokens) {
  FloatTask task;
  task.tokens = tokens;
  task.rows = random.between(1, 40);
  task.columns = random.between(1, 150);
  task.weight_stride = task.columns + random.between(0, 3);
  task.x_stride = task.columns + random.between(0, 3);
  task.out_stride = task.rows + random.between(0, 3);
  const bool odd = random.one_in(4);
  Floats weight = random.normals((task.rows - 1) * task.weight_stride + task.columns);
  Floats x = random.normals((tokens - 1) * task.x_stride + task.columns);
  for (float& value : x) {
    if (odd && random.one_in(97)) value = random.strange();
  }
  std::vector<uint16_t> narrow;
  for (float& value : weight) {
    if (odd && random.one_in(97)) value = random.strange();
    if (kind == FloatKind::kBfloat16) narrow.push_back(to_bfloat16(value));
    if (kind == FloatKind::kFloat16) narrow.push_back(float_to_half(value));
    if (kind == FloatKind::kBfloat16) value = from_bfloat16(narrow.back());
    if (kind == FloatKind::kFloat16) value = half_to_float(narrow.back());
  }
  task.weight = narrow.empty() ? static_cast<const void*>(weight.data()) : narrow.data();
  task.x = x.data();
  const std::string what = text("float kind ", static_cast<int>(kind), ", ", tokens, " tokens, ",
                                task.columns, " columns, ", task.rows, " rows");
  const size_t size = static_cast<size_t>((tokens - 1) * task.out_stride + task.rows);
  const Floats product = same_everywhere(family, what, [&] {
    Floats out(size, kMark);
    task.out = out.data();
    matmul_float(kind, task);
    return out;
  });
  Floats twin(size, kMark);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t row = 0; row < task.rows; ++row) {
      twin[t * task.out_stride + row] =
          dot_twin(weight, row * task.weight_stride, x.data() + t * task.x_stride, task.columns);
    }
  }
  family.expect_equal(twin, product, what + " by the definition");
}

}  // namespace

void test_matmul(Family& family) {
  Random random(1);
  for (int64_t tokens = 1; tokens <= 90; ++tokens) {
    for (int i = 0; i < kNumFormats; ++i) {
      test_packed(family, random, static_cast<Format>(i), tokens);
    }
    for (int i = 0; i < kNumFloatKinds; ++i) {
      test_float(family, random, static_cast<FloatKind>(i), tokens);
    }
    test_gated(family, random, tokens);
  }
  for (const int64_t jobs : {1, 2, 3, 8, 64, 65, 130}) test_many(family, random, jobs);
  // More than one task takes; with several chunks of tokens.
  for (const int64_t tokens : {255, 257, 300}) {
    test_gated(family, random, tokens);
    test_packed(family, random, Format::kQ4m, tokens);
  }
}

}  // namespace minisgl_test
