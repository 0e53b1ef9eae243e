// A model's forward as a flat list of native steps, recorded once and run for any batch.
//
// A buffer is a number at recording and holds one row per token at running. Tokens run in tiles of
// at most 512: since no row depends on its neighbours, cutting a batch up changes no bit, and
// scratch memory stays bounded and near the processor. A tile may begin or end inside a request;
// that is chunked prefill.
//
// Steps are of two kinds. A part step works on some tokens, or, if it says so, on some of their
// columns; neighbouring part steps are run together, part by part, in one parallel region (or in
// none, for little work). A whole step works on the tile and brings its own parallelism: a matrix
// product, attention. Steps after `select` see only the rows whose logits are wanted.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "activations.h"
#include "attention.h"
#include "commit.h"
#include "elementwise.h"
#include "experts.h"
#include "matmul.h"

namespace minisgl {

constexpr int64_t kTileRows = 512;
constexpr int kLogits = -1;  // in place of an output buffer: the caller's logits

// A weight matrix: packed, or of floats `stride` elements apart. Memory belongs to someone else.
struct MatrixRef {
  bool packed;
  PackedView view;  // rows and columns are valid in both cases
  FloatKind kind;
  const void* data;
  int64_t stride;
};

// out = parts . x, the rows of all parts side by side. x: rows of floats, in 8 bits too (`quantized`)
// where a part is packed; null if none is.
void multiply(const std::vector<MatrixRef>& parts, const Activations* quantized, const float* x,
              int64_t x_stride, int64_t tokens, float* out, int64_t out_stride);

// Gate and up of an MLP, which may lie on top of each other in one matrix; both packed, with a
// multiple of 32 rows.
struct GatedWeights {
  PackedView gate, up;

  // inner: the rows of each. Throws std::invalid_argument.
  static GatedWeights of(const std::vector<MatrixRef>& gate_up, int64_t inner);
};

// Parts lie on top of each other.
struct ExpertMatrices {
  std::vector<MatrixRef> gate_up, down;
};

// Everything a run needs; checked by run(). Requests as in AttentionBatch.
struct RunArgs {
  int64_t num_tokens;
  const int32_t* input_ids;
  const int32_t* positions;
  const int32_t* out_loc;
  AttentionBatch requests;
  int64_t num_wanted;
  const int64_t* wanted;  // rising token rows
  float* logits;
  int64_t logits_stride;
};

// The tokens that a step works on.
struct Tile {
  int64_t rows;
  const int32_t* ids;
  const int32_t* positions;
  const int32_t* out_loc;
  const AttentionBatch* requests;  // those that the tile touches
  float* logits;
};

// Rows [begin, end) of a tile, and of these the columns of groups [first_group, end_group).
struct Part {
  int64_t begin, end, first_group, end_group;
};

// The requests that a tile touches: where their tokens lie in it, and how long the KV of each is at
// its last token in the tile.
struct TileRequests {
  std::vector<int32_t> query_start, kv_len;
  const int32_t* rows = nullptr;  // of the first one

  int64_t count() const { return static_cast<int64_t>(kv_len.size()); }
};

// What an attention step needs besides its buffers.
struct AttentionParams {
  AttentionShape shape;
  KVStore kv;
  const float *cos, *sin;  // by position, `half` columns
  int64_t half;
  const float *q_norm, *k_norm;  // null where heads are not normed
  float eps;
};

struct StepTime {
  std::string name;
  int64_t nanoseconds;
  int64_t bytes;  // of weights read
};

class Program {
 public:
  using PartFn = std::function<void(const Tile&, const Part&)>;
  using WholeFn = std::function<void(const Tile&)>;

  // Ids, locations and positions that a run may use: [0, limit) each. Locations from `padding` on are
  // those of rows that pad a batch.
  Program(int64_t num_ids, int64_t num_locations, int64_t num_positions, int64_t padding);
  ~Program();

  int add_buffer(int64_t width);
  int64_t width(int buffer) const;

  // out = scale * row of `weight` for each token
  void embed(const MatrixRef& weight, float scale, int out);
  void rms_norm(int x, const float* weight, float eps, int out);
  void add_rms_norm(int x, int residual, const float* weight, float eps);
  void gate_mul(Activation kind, int x, int out);
  void bias(int x, const float* bias, int64_t n);
  void linear(int x, const std::vector<MatrixRef>& parts, int out);
  // down . (kind(gate . x) * up . x), gate and up being the halves of the rows of `gate_up`. All
  // are packed, and what they multiply has a multiple of 32 rows.
  void gated_mlp(int x, const std::vector<MatrixRef>& gate_up, Activation kind,
                 const MatrixRef& down, int out);
  // For each token the weighted sum of top_k experts, chosen by the router's logits `gating`, one for
  // each expert (experts.h). A matrix may be packed or of floats.
  void experts(int x, int gating, const std::vector<ExpertMatrices>& matrices, Activation kind,
               int64_t top_k, bool renormalize, int out);
  // Norms (if asked to) and rotates q and k, stores k and v, attends; overwrites q inside qkv.
  void attention(int qkv, int out, const AttentionParams& params);
  // Copies the wanted rows of x to `to`; all selects of a program stand together.
  void select(int x, int to);

  // For families of steps that live elsewhere (attention). elements: the work of a row, in what
  // a norm does with one number. groups: those of a row, if any of them can be worked on alone.
  template <class Body>
  void add_row_step(const char* name, int64_t elements, Body body) {
    add_part_step(name, elements, 0, [=](const Tile& tile, const Part& part) {
      for (int64_t row = part.begin; row < part.end; ++row) body(tile, row);
    });
  }
  void add_part_step(const char* name, int64_t elements, int64_t groups, PartFn fn);
  void add_whole_step(const char* name, int64_t bytes, WholeFn fn);
  float* at(int buffer, int64_t row = 0) const {
    return buffers_[buffer].data + row * buffers_[buffer].width;
  }

  // Throws std::invalid_argument or std::out_of_range before anything is written.
  void run(const RunArgs& args);

  // The steps run since the last call, in order; empty unless set_profile(true) came before.
  void set_profile(bool on) {
    std::lock_guard<std::mutex> lock(busy_);
    profile_ = on;
  }
  std::vector<StepTime> take_profile();
  size_t num_steps() const { return steps_.size(); }

 private:
  struct Buffer {
    int64_t width;
    float* data;
  };
  struct Step {
    const char* name;
    int64_t elements, groups, bytes;
    PartFn part;
    WholeFn whole;
  };
  using Quantized = std::shared_ptr<std::unique_ptr<Activations>>;

  bool in_tail() const { return tail_begin_ > 0; }
  // Where quantised rows are: (columns, whether of the tail, whether inside an MLP).
  using Place = std::tuple<int64_t, bool, bool>;
  Quantized quantized(int64_t columns, bool is_inside);
  Quantized quantize(int x);
  void make_quantized(int64_t rows, bool is_tail);
  void check(const RunArgs& args) const;
  void reserve(int64_t rows);
  void run_steps(const Tile& tile, size_t begin, size_t end);
  void run_parts(const Tile& tile, size_t begin, size_t end);
  void run_timed(size_t begin, size_t end, const std::function<void()>& body);
  static void cut_requests(const RunArgs& args, int64_t begin, int64_t end, TileRequests* out);
  int64_t run_tail(int64_t rows, const RunArgs& args, int64_t done);

  int64_t num_ids_, num_locations_, num_positions_;
  std::vector<Buffer> buffers_;
  std::vector<Step> steps_;
  std::vector<std::pair<int, int>> selects_;
  std::map<Place, Quantized> quantized_;
  std::shared_ptr<ExpertScratch> expert_scratch_;
  std::shared_ptr<CommitAhead> commit_;  // of KV, by idle workers
  size_t tail_begin_ = 0;
  int64_t capacity_ = 0;       // rows of each buffer
  int64_t logits_stride_ = 0;  // of the run in progress
  std::mutex busy_;
  bool profile_ = false;
  std::vector<StepTime> times_;
};

}  // namespace minisgl
