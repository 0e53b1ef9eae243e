// Row kernels at every width, and what sampling needs.
#include "elementwise.h"

#include <algorithm>

#include "test.h"

namespace minisgl_test {
namespace {

Floats row_of(Random& random, int64_t n, bool odd) {
  Floats x(static_cast<size_t>(n));
  for (float& value : x) {
    value = random.normal() * 4;
    if (random.one_in(4)) value = std::nearbyint(value);  // equal ones
    if (odd && random.one_in(23)) value = random.strange();
  }
  return x;
}

Floats joined(Floats a, const Floats& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

void test_rows(Family& family, Random& random, int64_t n, bool odd) {
  const std::string of = text(" of ", n, odd ? ", odd values" : "");
  const Floats x = row_of(random, n, odd), y = row_of(random, n, odd), w = random.normals(n);
  const Floats normed = same_everywhere(family, "rms_norm" + of, [&] {
    Floats out(x);
    elementwise_kernels().rms_norm(out.data(), w.data(), n, 1e-5f, out.data());  // in place
    return out;
  });
  same_everywhere(family, "add_rms_norm" + of, [&] {
    Floats residual = y, out(x.size());
    elementwise_kernels().add_rms_norm(x.data(), residual.data(), w.data(), n, 1e-5f, out.data());
    return joined(residual, out);
  });
  for (int kind = 0; kind < kNumActivations; ++kind) {
    same_everywhere(family, text("gate ", kind) + of, [&] {
      Floats out = y;
      elementwise_kernels().gate_mul[kind](x.data(), out.data(), n, out.data());
      return out;
    });
  }
  same_everywhere(family, "add" + of, [&] {
    Floats out = x;
    elementwise_kernels().add(out.data(), y.data(), n);
    return out;
  });
  const Floats stats = same_everywhere(family, "softmax_stats" + of, [&] {
    const SoftmaxStats result = elementwise_kernels().softmax_stats(x.data(), n, 0.7f);
    return Floats{result.max, result.sum};
  });
  if (odd) return;
  double squares = 0, sum = 0;
  for (const float value : x) squares += static_cast<double>(value) * value;
  for (const float value : x) sum += std::exp((static_cast<double>(value) - stats[0]) * 0.7);
  family.check(std::fabs(stats[1] - sum) <= 1e-5 * sum, "softmax_stats" + of + ": wrong sum");
  for (int64_t i = 0; i < n; ++i) {
    const double wanted = x[i] / std::sqrt(squares / static_cast<double>(n) + 1e-5) * w[i];
    const double error = std::fabs(normed[i] - wanted);
    family.check(error <= 1e-6 * std::fabs(wanted) + 1e-9, "rms_norm" + of + ": far off");
  }
}

void test_largest(Family& family, Random& random, int64_t n, bool odd) {
  const std::string of = text(" of ", n, odd ? ", odd values" : "");
  Floats x = row_of(random, n, odd);
  const float most = random.one_in(2) ? 4.0f : kInf;  // many largest ones, or one
  for (float& value : x) value = value > most ? most : value;
  bool has_nan = false;
  std::vector<int64_t> order;  // of the numbers, the largest first, equal ones by index
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] == x[i]) order.push_back(i);
    has_nan |= x[i] != x[i];
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x[a] > x[b]; });
  const Floats top = same_everywhere(family, "arg_max" + of, [&] {
    const ArgMax result = elementwise_kernels().arg_max(x.data(), n);
    return Floats{result.value, static_cast<float>(result.index)};
  });
  const int64_t index = static_cast<int64_t>(top[1]);
  family.check(has_nan ? x[index] != x[index] : index == order[0], "arg_max" + of + ": another");
  for (const int64_t k : {int64_t{1}, int64_t{7}, n / 3, n, n + 5}) {
    const Floats found = same_everywhere(family, text("top ", k) + of, [&] {
      Floats values(static_cast<size_t>(k), kMark);
      std::vector<int32_t> indices(static_cast<size_t>(k), -1);
      top_candidates(x.data(), n, k, values.data(), indices.data());
      return joined(values, Floats(indices.begin(), indices.end()));
    });
    Floats wanted(static_cast<size_t>(k), kMark), indices(static_cast<size_t>(k), -1);
    for (int64_t i = 0; i < std::min<int64_t>(k, static_cast<int64_t>(order.size())); ++i) {
      wanted[i] = x[order[i]];
      indices[i] = static_cast<float>(order[i]);
    }
    family.expect_equal(joined(wanted, indices), found, text("top ", k) + of + " by sorting");
  }
}

void test_penalties(Family& family, Random& random, int64_t n) {
  const Floats x = row_of(random, n, true);
  std::vector<int32_t> counts;
  std::vector<uint8_t> seen;
  for (int64_t i = 0; i < n; ++i) {
    counts.push_back(static_cast<int32_t>(std::max<int64_t>(0, random.between(-5, 3))));
    seen.push_back(counts.back() > 0 || random.one_in(9));
  }
  const Penalties penalties{1.25f, 0.5f, 0.75f, counts.data(), seen.data()};
  const Floats out = same_everywhere(family, text("penalties of ", n), [&] {
    Floats logits = x;
    apply_penalties(logits.data(), n, penalties);
    return logits;
  });
  Floats wanted = x;
  for (int64_t i = 0; i < n; ++i) {
    if (seen[i]) wanted[i] = x[i] > 0 ? x[i] / 1.25f : x[i] * 1.25f;
    if (counts[i] > 0) wanted[i] = wanted[i] - 0.5f * static_cast<float>(counts[i]) - 0.75f;
  }
  family.expect_equal(wanted, out, "penalties by their formula");
}

}  // namespace

void test_elementwise(Family& family) {
  Random random(4);
  for (int64_t n = 1; n <= 80; ++n) {
    const int64_t width = n <= 70 ? n : random.between(500, 5000);
    for (const bool odd : {false, true}) {
      test_rows(family, random, width, odd);
      test_largest(family, random, width, odd);
    }
    test_penalties(family, random, width);
  }
  // Every power of the exponential, and what lies outside.
  Floats range;
  for (float x = -120; x < 120; x += 0.037f) range.push_back(x);
  const Floats ones(range.size(), 1.0f);
  for (int kind = 0; kind < kNumActivations; ++kind) {
    same_everywhere(family, text("gate ", kind, " over a wide range"), [&] {
      Floats out(range.size());
      elementwise_kernels().gate_mul[kind](range.data(), ones.data(),
                                           static_cast<int64_t>(range.size()), out.data());
      return out;
    });
  }
}

}  // namespace minisgl_test
