// Choosing a token: greedy, a row without a finite maximum, and draws against the definition of
// sample.h written out in double precision.
#include "sample.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "test.h"

namespace minisgl_test {
namespace {

int32_t choose(Family& family, const std::string& what, const Floats& logits, const Draw& draw) {
  const Floats result = same_everywhere(family, what, [&] {
    const auto n = static_cast<int64_t>(logits.size());
    return Floats{static_cast<float>(choose_token(logits.data(), n, draw))};
  });
  return static_cast<int32_t>(result[0]);
}

// The tokens that the definition gives if a mass is off by what single precision leaves of it.
std::set<int32_t> allowed(const Floats& logits, const Draw& draw) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  if (draw.top_k < static_cast<int64_t>(order.size())) order.resize(draw.top_k);
  const double most = logits[order[0]];
  std::vector<double> weight;
  for (const int32_t i : order) weight.push_back(std::exp((logits[i] - most) / draw.temperature));
  const double mass = std::accumulate(weight.begin(), weight.end(), 0.0);
  std::set<int32_t> tokens;
  for (const double off : {1 - 1e-5, 1.0, 1 + 1e-5}) {
    double kept = 0, sum = 0;
    size_t count = 0;
    const double wanted = draw.top_p < 1 ? draw.top_p * mass * off : kInf;
    for (; count < order.size() && kept < wanted; ++count) kept += weight[count];
    for (; count > 1 && weight[count - 1] < draw.min_p; --count) kept -= weight[count - 1];
    const double drawn = draw.uniform * kept;
    for (size_t i = 0; i < count && sum <= drawn * (1 + 1e-5); ++i) {
      sum += weight[i];
      if (weight[i] > 0 && sum > drawn * (1 - 1e-5)) tokens.insert(order[i]);
    }
  }
  return tokens;
}

Floats row_of(Random& random, int64_t n) {
  Floats x(static_cast<size_t>(n));
  const bool banned = random.one_in(3);
  for (float& value : x) {
    value = random.normal() * 4;
    if (random.one_in(4)) value = std::nearbyint(value);  // equal ones
    if (banned && random.one_in(3)) value = -kInf;
  }
  x[static_cast<size_t>(random.between(0, n - 1))] = 5;
  return x;
}

Draw draw_of(Random& random, int64_t n) {
  Draw draw;
  const double temperatures[] = {0.05, 0.7, 1.0, 30.0};
  draw.temperature = temperatures[random.between(0, 3)];
  draw.top_k = random.one_in(2) ? n : random.between(1, n + 3);
  draw.top_p = random.one_in(2) ? 1.0 : random.uniform();
  draw.min_p = random.one_in(2) ? 0.0 : 0.3 * random.uniform();
  draw.uniform = random.one_in(5) ? 0.0 : random.uniform();
  if (random.one_in(9)) draw.uniform = 1.0 - 0x1p-53;
  return draw;
}

}  // namespace

void test_sample(Family& family) {
  Random random(9);
  int64_t draws = 0, certain = 0;
  for (int round = 0; round < 300; ++round) {
    const int64_t n = round < 100 ? round + 1 : random.between(1, round % 10 == 0 ? 5000 : 500);
    const std::string of = text(" of ", n, ", round ", round);
    Floats x = row_of(random, n);
    const int32_t best = choose(family, "greedy" + of, x, Draw());
    family.check(best == std::max_element(x.begin(), x.end()) - x.begin(), "greedy" + of);
    for (int i = 0; i < 5; ++i, ++draws) {
      const Draw draw = draw_of(random, n);
      const std::string what =
          text("draw", of, ", temperature ", draw.temperature, ", top_k ", draw.top_k, ", top_p ",
               draw.top_p, ", min_p ", draw.min_p, ", uniform ", draw.uniform);
      const int32_t token = choose(family, what, x, draw);
      const std::set<int32_t> wanted = allowed(x, draw);
      certain += wanted.size() == 1;
      family.check(wanted.count(token) == 1, text(what, ": ", token, ", not ", *wanted.begin()));
    }
    const Draw draw = draw_of(random, n);
    x[static_cast<size_t>(random.between(0, n - 1))] = random.one_in(2) ? kNan : kInf;
    family.check(choose(family, "spoilt" + of, x, Draw()) == -1, "greedy from a spoilt row" + of);
    family.check(choose(family, "spoilt" + of, x, draw) == -1, "drawn from a spoilt row" + of);
    x.assign(x.size(), -kInf);
    family.check(choose(family, "empty" + of, x, Draw()) == -1, "greedy from nothing" + of);
    family.check(choose(family, "empty" + of, x, draw) == -1, "drawn from nothing" + of);
  }
  family.check(certain * 10 > draws * 9, "the definition leaves too much open to test anything");
}

}  // namespace minisgl_test
