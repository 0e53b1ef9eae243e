#include "experts.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "elementwise.h"

namespace minisgl {

void route(const float* logits, int64_t n, int64_t top_k, bool renormalize, int32_t* experts,
           float* weights) {
  if (top_candidates(logits, n, top_k, weights, experts) < top_k) {
    for (int64_t i = 0; i < top_k; ++i) {
      experts[i] = static_cast<int32_t>(i);
      weights[i] = std::numeric_limits<float>::quiet_NaN();
    }
    return;
  }
  const auto stats = elementwise_kernels().softmax_stats(logits, n, 1.0f);
  float total = 0.0f;
  for (int64_t i = 0; i < top_k; ++i) {
    const double below = static_cast<double>(weights[i]) - stats.max;
    weights[i] = static_cast<float>(std::exp(below)) / stats.sum;
    total += weights[i];
  }
  if (!renormalize) return;
  for (int64_t i = 0; i < top_k; ++i) weights[i] /= total;
}

void Routing::make(const float* logits, int64_t num_tokens, int64_t n, int64_t top_k,
                   bool renormalize) {
  const auto num_pairs = static_cast<size_t>(num_tokens * top_k);
  experts.resize(num_pairs);
  weights.resize(num_pairs);
  tokens.resize(num_pairs);
  places.resize(num_pairs);
  for_rows(num_tokens, 16 * n, [&](int64_t row) {
    route(logits + row * n, n, top_k, renormalize, &experts[static_cast<size_t>(row * top_k)],
          &weights[static_cast<size_t>(row * top_k)]);
  });
  first.assign(static_cast<size_t>(n + 1), 0);
  for (const int32_t expert : experts) ++first[static_cast<size_t>(expert + 1)];
  for (size_t e = 1; e < first.size(); ++e) first[e] += first[e - 1];
  std::vector<int32_t> next(first.begin(), first.end() - 1);
  for (size_t pair = 0; pair < num_pairs; ++pair) {
    const int32_t place = next[static_cast<size_t>(experts[pair])]++;
    places[pair] = place;
    tokens[static_cast<size_t>(place)] = static_cast<int32_t>(pair / static_cast<size_t>(top_k));
  }
}

}  // namespace minisgl
