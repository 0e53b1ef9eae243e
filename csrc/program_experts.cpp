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
  GatedWeights gated;  // if packed
  std::vector<MatrixRef> gate_up;
  MatrixRef down;
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

void run_packed(const std::vector<Share>& shares, const float* x, int64_t columns, GateFn combine,
                int64_t width, ExpertScratch* scratch) {
  scratch->inputs.resize(std::max(scratch->inputs.size(), shares.size()));
  scratch->hidden.resize(scratch->inputs.size());
  quantize_shares(shares, scratch->routing, x, columns, &scratch->inputs);
  std::vector<GatedJob> gated;
  std::vector<PackedJob> down;
  for (size_t i = 0; i < shares.size(); ++i) {
    const Expert& expert = *shares[i].expert;
    Activations* hidden = reuse(scratch->hidden[i], shares[i].count, expert.down.view.columns);
    gated.push_back({scratch->inputs[i].get(), expert.gated.gate, expert.gated.up, hidden});
    float* out = scratch->results.data() + shares[i].first * width;
    down.push_back({hidden, expert.down.view, out, width});
  }
  matmul_gated(gated.data(), static_cast<int64_t>(gated.size()), combine);
  matmul_packed(down.data(), static_cast<int64_t>(down.size()));
}

void run_floats(const std::vector<Share>& shares, const float* x, int64_t columns, GateFn combine,
                int64_t width, ExpertScratch* scratch) {
  const auto num_places = scratch->routing.tokens.size();
  const int64_t inner = shares.front().expert->down.view.columns;
  scratch->gathered.resize(num_places * static_cast<size_t>(columns));
  scratch->gates.resize(num_places * static_cast<size_t>(2 * inner));
  for (size_t i = 0; i < num_places; ++i) {
    std::memcpy(scratch->gathered.data() + i * static_cast<size_t>(columns),
                x + scratch->routing.tokens[i] * columns, static_cast<size_t>(columns) * 4);
  }
  for (const Share& share : shares) {
    const float* in = scratch->gathered.data() + share.first * columns;
    float* gates = scratch->gates.data() + share.first * 2 * inner;
    float* to = gates;
    for (const MatrixRef& part : share.expert->gate_up) {
      matmul_float(part.kind, {part.data, part.stride, in, columns, to, 2 * inner, part.view.rows,
                               share.count, columns});
      to += part.view.rows;
    }
    for_rows(share.count, 6 * inner, [&](int64_t row) {
      float* gate = gates + row * 2 * inner;
      combine(gate, gate + inner, inner, gate);
    });
    const MatrixRef& down = share.expert->down;
    matmul_float(down.kind, {down.data, down.stride, gates, 2 * inner,
                             scratch->results.data() + share.first * width, width,
                             down.view.rows, share.count, inner});
  }
}

}  // namespace

GatedWeights GatedWeights::of(const std::vector<MatrixRef>& gate_up, int64_t inner) {
  std::vector<PackedView> halves;
  int64_t rows = 0;
  for (const MatrixRef& part : gate_up) {
    if (!part.packed) fail("gate and up are not packed");
    rows += part.view.rows;
    PackedView half = part.view;
    if (gate_up.size() == 1) half.rows = inner;
    halves.push_back(half);
    half.data += inner / kPanelRows * half.panel_bytes();
    if (gate_up.size() == 1) halves.push_back(half);
  }
  if (halves.size() != 2 || rows != 2 * inner || inner % kGroup != 0 || halves[0].rows != inner) {
    fail("gate and up do not match what comes after them");
  }
  return {halves[0], halves[1]};
}

void Program::experts(int x, int gating, const std::vector<ExpertMatrices>& matrices,
                      Activation kind, int64_t top_k, bool renormalize, int out) {
  const int64_t columns = width(x), num_experts = width(gating), rows = width(out);
  if (static_cast<int64_t>(matrices.size()) != num_experts || matrices.empty()) {
    fail("the router and the experts do not match");
  }
  if (top_k < 1 || top_k > num_experts) fail("bad number of experts per token");
  if (x == out || x == gating || gating == out) fail("experts work in buffers of their own");
  const bool packed = matrices.front().down.packed;
  std::vector<Expert> experts;
  for (const ExpertMatrices& each : matrices) {
    const int64_t inner = each.down.view.columns;
    int64_t inner_rows = 0;
    for (const MatrixRef& part : each.gate_up) {
      if (part.view.columns != columns) fail("gate, up and input do not match");
      if (part.packed != packed) fail("experts of floats and of packed matrices");
      inner_rows += part.view.rows;
    }
    if (each.down.packed != packed || each.down.view.rows != rows || inner_rows != 2 * inner ||
        inner != matrices.front().down.view.columns) {
      fail("bad end of an expert");
    }
    Expert expert{{}, each.gate_up, each.down};
    if (packed) expert.gated = GatedWeights::of(each.gate_up, inner);
    experts.push_back(std::move(expert));
  }
  const auto combine = elementwise_kernels().gate_mul[static_cast<int>(kind)];
  std::shared_ptr<ExpertScratch>& scratch = expert_scratch_;
  if (!scratch) scratch = std::make_shared<ExpertScratch>();
  add_whole_step("experts", 0, [=, scratch = scratch](const Tile& tile) {
    scratch->routing.make(at(gating), tile.rows, num_experts, top_k, renormalize);
    const std::vector<Share> shares = shares_of(experts, scratch->routing);
    scratch->results.resize(static_cast<size_t>(tile.rows * top_k * rows));
    const auto run = packed ? run_packed : run_floats;
    run(shares, at(x), columns, combine, rows, scratch.get());
  });
  const auto groups = (rows + kGroup - 1) / kGroup;
  add_part_step("add", top_k * rows, groups, [=, scratch = scratch](const Tile&, const Part& part) {
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
