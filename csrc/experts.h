// Which experts of a mixture a token meets, and the memory in which they work.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "activations.h"

namespace minisgl {

// The top_k experts of one token by their router's logits, best first (equal ones by rising index),
// and their weights: the softmax over all n experts, or with `renormalize` over the chosen ones.
// A row without top_k numbers that can be compared gives NaN weights.
void route(const float* logits, int64_t n, int64_t top_k, bool renormalize, int32_t* experts,
           float* weights);

// The pairs of a token and one of its experts, expert by expert, tokens rising: those of expert e
// are the places [first[e], first[e + 1]).
struct Routing {
  std::vector<int32_t> experts;  // of each pair, token by token
  std::vector<float> weights;
  std::vector<int32_t> first;
  std::vector<int32_t> tokens;  // at each place
  std::vector<int32_t> places;  // of each pair

  // logits: (tokens, n), rows side by side.
  void make(const float* logits, int64_t num_tokens, int64_t n, int64_t top_k, bool renormalize);
};

// What the layers of a model share: of each expert that works its input and what is inside of it,
// and its results, a row for each place.
struct ExpertScratch {
  Routing routing;
  std::vector<std::unique_ptr<Activations>> inputs, hidden;
  std::vector<float> gathered, gates, results;
};

}  // namespace minisgl
