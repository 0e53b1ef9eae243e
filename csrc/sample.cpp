#include "sample.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "elementwise.h"

namespace minisgl {
namespace {

constexpr double kMinTemperature = 1e-5;
// So many candidates are looked at first, then 16 times as many, and so on: a nucleus is small.
constexpr int64_t kFirstCandidates = 128;

// The largest logits of a row in falling order, and their mass, that of the first one being 1.
struct Candidates {
  std::vector<float> values;
  std::vector<int32_t> indices;
  std::vector<double> weights, sums;  // sums of the weights up to and with each

  Candidates(const float* logits, int64_t n, int64_t k, double temperature)
      : values(k), indices(k) {
    const int64_t count = top_candidates(logits, n, k, values.data(), indices.data());
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) {
      weights.push_back(std::exp((static_cast<double>(values[i]) - values[0]) / temperature));
      sums.push_back(sum += weights.back());
    }
  }

  int64_t count() const { return static_cast<int64_t>(sums.size()); }
};

// The drawn token, -1 if more candidates are needed to tell. total: the mass of the whole row.
int32_t draw_from(const Candidates& from, int64_t n, const Draw& draw, double total) {
  const bool has_all = from.count() == std::min(draw.top_k, n);
  const bool is_whole = draw.top_k >= n && draw.top_p >= 1.0 && draw.min_p <= 0.0;
  const auto first = from.sums.begin();
  auto end = from.sums.end();
  if (draw.top_p < 1.0) {
    const double mass = draw.top_k < n ? from.sums.back() : total;
    end = std::lower_bound(first, end - 1, draw.top_p * mass) + 1;
  }
  while (end - first > 1 && from.weights[end - first - 1] < draw.min_p) --end;
  if (end == from.sums.end() && !has_all && !is_whole) return -1;
  auto at = std::upper_bound(first, end, draw.uniform * (is_whole ? total : *(end - 1)));
  if (at == end) {
    if (!has_all && is_whole) return -1;
    for (--at; at > first && from.weights[at - first] == 0.0;) --at;
  }
  return from.indices[at - first];
}

}  // namespace

int32_t choose_token(const float* logits, int64_t n, const Draw& draw) {
  const auto& kernels = elementwise_kernels();
  const ArgMax best = kernels.arg_max(logits, n);
  if (!std::isfinite(best.value)) return -1;
  if (draw.temperature <= 0.0 || draw.top_k == 1) return static_cast<int32_t>(best.index);
  const double temperature = std::max(draw.temperature, kMinTemperature);
  const double total = kernels.softmax_stats(logits, n, static_cast<float>(1.0 / temperature)).sum;
  for (int64_t k = draw.top_k < n ? draw.top_k : kFirstCandidates;; k *= 16) {
    const Candidates candidates(logits, n, std::min(k, n), temperature);
    const int32_t token = draw_from(candidates, n, draw, total);
    if (token >= 0) return token;
  }
}

}  // namespace minisgl
