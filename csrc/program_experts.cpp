// The steps of a mixture of experts: route, multiply expert by expert, add up token by token.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pool.h"
#include "program.h"

namespace minisgl {
namespace {

[[noreturn]] void fail(const char* what) { throw std::invalid_argument(what); }

struct Expert {
  GatedWeights gated;  // if all of it is packed: what is inside goes on in 8 bits
  std::vector<MatrixRef> gate_up, down;
  int64_t inner;
};

// The places of one expert.
struct Share {
  const Expert* expert;
  int64_t first, count;
};

std::vector<Share> shares_of(const std::vector<Expert>& experts, const Routing& routing) {
  std::vector<Share> shares;
  for (size_t e = 0; e < experts.size(); ++e) {
    const int64_t count = routing.first[e + 1] - routing.first[e];
    if (count > 0) shares.push_back({&experts[e], routing.first[e], count});
  }
  return shares;
}

Activations* reuse(std::unique_ptr<Activations>& slot, int64_t tokens, int64_t columns) {
  if (!slot || slot->tokens() != tokens || slot->columns() != columns) {
    slot = std::make_unique<Activations>(tokens, columns);
  }
  return slot.get();
}

// The tokens of each expert in 8 bits.
void quantize_shares(const std::vector<Share>& shares, const Routing& routing, const float* x,
                     int64_t columns, std::vector<std::unique_ptr<Activations>>* inputs) {
  struct Block {
    Activations* to;
    int64_t begin, end, first;
  };
  std::vector<Block> blocks;
  for (size_t i = 0; i < shares.size(); ++i) {
    const Share& share = shares[i];
    Activations* to = reuse((*inputs)[i], share.count, columns);
    for (int64_t begin = 0; begin < share.count; begin += kTokenBlock) {
      blocks.push_back({to, begin, std::min(begin + kTokenBlock, share.count), share.first});
    }
  }
  parallel_for(static_cast<int64_t>(blocks.size()), [&](int64_t index) {
    const Block& block = blocks[static_cast<size_t>(index)];
    for (int64_t i = block.begin; i < block.end; ++i) {
      const int64_t token = routing.tokens[static_cast<size_t>(block.first + i)];
      block.to->quantize_part(x + token * columns, columns, i, i + 1, 0, block.to->groups());
    }
  });
  for (size_t i = 0; i < shares.size(); ++i) (*inputs)[i]->relate_scales();
}

bool any_packed(const std::vector<MatrixRef>& parts) {
  return std::any_of(parts.begin(), parts.end(), [](const MatrixRef& part) { return part.packed; });
}

// All products of all experts in two parallel regions.
void run_gated(const std::vector<Share>& shares, GateFn combine, int64_t width,
               ExpertScratch* scratch) {
  std::vector<GatedJob> gated;
  std::vector<PackedJob> down;
  for (size_t i = 0; i < shares.size(); ++i) {
    const Expert& expert = *shares[i].expert;
    Activations* hidden = reuse(scratch->hidden[i], shares[i].count, expert.inner);
    gated.push_back({scratch->inputs[i].get(), expert.gated.gate, expert.gated.up, hidden});
    float* out = scratch->results.data() + shares[i].first * width;
    for (const MatrixRef& part : expert.down) {
      down.push_back({hidden, part.view, out, width});
      out += part.view.rows;
    }
  }
  matmul_gated(gated.data(), static_cast<int64_t>(gated.size()), combine);
  matmul_packed(down.data(), static_cast<int64_t>(down.size()));
}

// One expert step by step, whatever its matrices are; the same bits.
void run_one(const Share& share, size_t i, const float* x, int64_t columns, GateFn combine,
             int64_t width, ExpertScratch* scratch) {
  const Expert& expert = *share.expert;
  const int64_t inner = expert.inner;
  scratch->gathered.resize(static_cast<size_t>(share.count * columns));
  scratch->gates.resize(static_cast<size_t>(share.count * 2 * inner));
  float *gathered = scratch->gathered.data(), *gates = scratch->gates.data();
  for (int64_t row = 0; row < share.count; ++row) {
    const int64_t token = scratch->routing.tokens[static_cast<size_t>(share.first + row)];
    std::memcpy(gathered + row * columns, x + token * columns, static_cast<size_t>(columns) * 4);
  }
  multiply(expert.gate_up, scratch->inputs[i].get(), gathered, columns, share.count, gates,
           2 * inner);
  for_rows(share.count, 6 * inner, [&](int64_t row) {
    float* gate = gates + row * 2 * inner;
    combine(gate, gate + inner, inner, gate);
  });
  Activations* hidden = nullptr;
  if (any_packed(expert.down)) {
    hidden = reuse(scratch->hidden[i], share.count, inner);
    hidden->quantize(gates, 2 * inner);
  }
  multiply(expert.down, hidden, gates, 2 * inner, share.count,
           scratch->results.data() + share.first * width, width);
}

}  // namespace

void Program::experts(int x, int gating, const std::vector<ExpertMatrices>& matrices,
                      Activation kind, int64_t top_k, bool renormalize, int out) {
  const int64_t columns = width(x), num_experts = width(gating), rows = width(out);
  if (static_cast<int64_t>(matrices.size()) != num_experts || matrices.empty()) {
    fail("the router and the experts do not match");
  }
  if (top_k < 1 || top_k > num_experts) fail("bad number of experts per token");
  if (x == out || x == gating || gating == out) fail("experts work in buffers of their own");
  std::vector<Expert> experts;
  bool all_gated = true, any_quantized = false;
  for (const ExpertMatrices& each : matrices) {
    if (each.down.empty()) fail("an expert without an end");
    const int64_t inner = each.down.front().view.columns;
    int64_t inner_rows = 0, out_rows = 0;
    bool is_gated = inner % kGroup == 0 && each.gate_up.size() <= 2;
    for (const MatrixRef& part : each.gate_up) {
      if (part.view.columns != columns) fail("gate, up and input do not match");
      inner_rows += part.view.rows;
      is_gated &= part.packed && part.view.rows % inner == 0;
    }
    for (const MatrixRef& part : each.down) {
      if (part.view.columns != inner) fail("bad end of an expert");
      out_rows += part.view.rows;
      is_gated &= part.packed;
    }
    if (out_rows != rows || inner_rows != 2 * inner) fail("bad end of an expert");
    Expert expert{{}, each.gate_up, each.down, inner};
    if (is_gated) expert.gated = GatedWeights::of(each.gate_up, inner);
    experts.push_back(std::move(expert));
    all_gated &= is_gated;
    any_quantized |= any_packed(each.gate_up);
  }
  const auto combine = elementwise_kernels().gate_mul[static_cast<int>(kind)];
  if (!expert_scratch_) expert_scratch_ = std::make_shared<ExpertScratch>();
  const std::shared_ptr<ExpertScratch> scratch = expert_scratch_;
  add_whole_step("experts", 0, [=](const Tile& tile) {
    scratch->routing.make(at(gating), tile.rows, num_experts, top_k, renormalize);
    const std::vector<Share> shares = shares_of(experts, scratch->routing);
    scratch->results.resize(static_cast<size_t>(tile.rows * top_k * rows));
    scratch->inputs.resize(std::max(scratch->inputs.size(), shares.size()));
    scratch->hidden.resize(scratch->inputs.size());
    if (any_quantized) {
      quantize_shares(shares, scratch->routing, at(x), columns, &scratch->inputs);
    }
    if (all_gated) return run_gated(shares, combine, rows, scratch.get());
    for (size_t i = 0; i < shares.size(); ++i) {
      run_one(shares[i], i, at(x), columns, combine, rows, scratch.get());
    }
  });
  const auto groups = (rows + kGroup - 1) / kGroup;
  add_part_step("add", top_k * rows, groups, [=](const Tile&, const Part& part) {
    const int64_t first = part.first_group * kGroup, end = std::min(part.end_group * kGroup, rows);
    for (int64_t row = part.begin; row < part.end; ++row) {
      float* sum = at(out, row);
      for (int64_t choice = 0; choice < top_k; ++choice) {
        const auto pair = static_cast<size_t>(row * top_k + choice);
        const float weight = scratch->routing.weights[pair];
        const float* from = scratch->results.data() + scratch->routing.places[pair] * rows;
        for (int64_t i = first; i < end; ++i) {
          sum[i] = choice == 0 ? from[i] * weight : sum[i] + from[i] * weight;
        }
      }
    }
  });
}

}  // namespace minisgl
