// How a product is cut into tasks; the kernels themselves are in matmul_<isa>.cpp.
#include "matmul.h"

#include "isa.h"
#include "pool.h"

namespace minisgl {
namespace {

// A task reads at most this much weight, so that it stays in the second-level cache while the
// tiles of many tokens pass over it.
constexpr int64_t kTaskBytes = 256 << 10;
constexpr int64_t kTilesPerTask = 4;  // 320 tokens
constexpr int64_t kManyTokens = 32;
constexpr int64_t kMaxJobs = 64;  // in one parallel region

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

const MatmulKernels& kernels() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return matmul_kernels_avx512();
    case Isa::kAvxVnni:
      return matmul_kernels_avxvnni();
    case Isa::kAvx2:
      return matmul_kernels_avx2();
#elif defined(__aarch64__)
    case Isa::kNeon:
      return matmul_kernels_neon();
#endif
    default:
      return matmul_kernels_portable();
  }
}

// How one job is cut: chunks of its weight times chunks of token tiles. A piece is what a chunk has
// several of: a pair of panels, since kernels may take two at once, or a group of gated rows.
struct Cut {
  int64_t pieces_per_task, weight_chunks, token_chunks;

  int64_t tasks() const { return weight_chunks * token_chunks; }
};

// How much weight a task reads when there is `total` of it. Some eight tasks per thread even out
// what other processes take, more where a task is long because it has many tokens.
int64_t task_bytes(int64_t total, int64_t tokens) {
  const int64_t tasks = (tokens < kManyTokens ? 8 : 16) * num_threads();
  return min64(kTaskBytes, max64(total / tasks, 1));
}

Cut make_cut(int64_t pieces, int64_t piece_bytes, int64_t tiles, int64_t bytes) {
  Cut cut;
  cut.pieces_per_task = max64(1, bytes / max64(piece_bytes, 1));
  cut.weight_chunks = div_up(pieces, cut.pieces_per_task);
  cut.token_chunks = div_up(tiles, kTilesPerTask);
  return cut;
}

// Panels [first, first + count) of a weight, times one tile of tokens.
void run_panels(const PackedView& weight, int64_t first, int64_t count, const ActivationTile& x,
                float* out, int64_t out_stride) {
  PanelTask work;
  work.panel_bytes = weight.panel_bytes();
  work.weight = weight.data + first * work.panel_bytes;
  work.groups = weight.groups();
  work.panels = count;
  work.rows = min64(count * kPanelRows, weight.rows - first * kPanelRows);
  work.x = x;
  work.out = out;
  work.out_stride = out_stride;
  kernels().packed[static_cast<int>(weight.format)](work);
}

// Pairs of panels [first, end) times the tiles [first_tile, end_tile).
void run_task(const PackedJob& job, int64_t first, int64_t end, int64_t first_tile,
              int64_t end_tile) {
  const int64_t panel = 2 * first, panels = min64(2 * end, job.weight.panels()) - panel;
  for (int64_t index = first_tile; index < end_tile; ++index) {
    float* out = job.out + index * kTileTokens * job.out_stride + panel * kPanelRows;
    run_panels(job.weight, panel, panels, job.x->tile(index), out, job.out_stride);
  }
}

// Groups of 32 rows [first, end) of gate and up times the tiles [first_tile, end_tile).
void run_gated(const GatedJob& job, GateFn combine, int64_t first, int64_t end,
               int64_t first_tile, int64_t end_tile) {
  constexpr int64_t kPanels = kGroup / kPanelRows;
  constexpr int64_t kFloats = kTileTokens * kGroup;  // of gate, and of up, at once
  alignas(64) float gates[kFloats], ups[kFloats];
  for (int64_t index = first_tile; index < end_tile; ++index) {
    const ActivationTile tile = job.x->tile(index);
    const int64_t token = index * kTileTokens, fitting = kFloats / (tile.stride * kGroup);
    for (int64_t g = first; g < end; g += fitting) {
      const int64_t count = min64(fitting, end - g), width = count * kGroup;
      run_panels(job.gate, g * kPanels, count * kPanels, tile, gates, width);
      run_panels(job.up, g * kPanels, count * kPanels, tile, ups, width);
      combine(gates, ups, tile.stride * width, gates);
      job.out->quantize_part(gates, width, token, token + tile.stride, g, g + count);
    }
  }
}

int64_t pieces_of(const PackedJob& job) { return div_up(job.weight.panels(), 2); }
int64_t piece_bytes_of(const PackedJob& job) { return 2 * job.weight.panel_bytes(); }
int64_t pieces_of(const GatedJob& job) { return job.gate.rows / kGroup; }
int64_t piece_bytes_of(const GatedJob& job) {
  return kGroup / kPanelRows * (job.gate.panel_bytes() + job.up.panel_bytes());
}

// Calls run(job, first piece, end, first tile, end) for all parts of at most kMaxJobs jobs.
template <class Job, class Run>
void share_out(const Job* jobs, int64_t num_jobs, const Run& run) {
  int64_t bytes = 0, tokens = 0, num_tasks = 0;
  for (int64_t i = 0; i < num_jobs; ++i) {
    bytes += pieces_of(jobs[i]) * piece_bytes_of(jobs[i]);
    tokens = max64(tokens, jobs[i].x->tokens());
  }
  Cut cuts[kMaxJobs];
  for (int64_t i = 0; i < num_jobs; ++i) {
    cuts[i] = make_cut(pieces_of(jobs[i]), piece_bytes_of(jobs[i]), jobs[i].x->tiles(),
                       task_bytes(bytes, tokens));
    num_tasks += cuts[i].tasks();
  }
  parallel_for(num_tasks, [&](int64_t task) {
    int64_t i = 0;
    for (; task >= cuts[i].tasks(); ++i) task -= cuts[i].tasks();
    const Job& job = jobs[i];
    const int64_t first = task % cuts[i].weight_chunks * cuts[i].pieces_per_task;
    const int64_t first_tile = task / cuts[i].weight_chunks * kTilesPerTask;
    run(job, first, min64(first + cuts[i].pieces_per_task, pieces_of(job)), first_tile,
        min64(first_tile + kTilesPerTask, job.x->tiles()));
  });
}

}  // namespace

void matmul_packed(const PackedJob* jobs, int64_t num_jobs) {
  for (; num_jobs > 0; jobs += kMaxJobs, num_jobs -= kMaxJobs) {
    share_out(jobs, min64(num_jobs, kMaxJobs), run_task);
  }
}

void matmul_gated(const GatedJob* jobs, int64_t num_jobs, GateFn combine) {
  for (; num_jobs > 0; jobs += kMaxJobs, num_jobs -= kMaxJobs) {
    const int64_t count = min64(num_jobs, kMaxJobs);
    share_out(jobs, count, [&](const GatedJob& job, int64_t first, int64_t end,
                               int64_t first_tile, int64_t end_tile) {
      run_gated(job, combine, first, end, first_tile, end_tile);
    });
    for (int64_t i = 0; i < count; ++i) jobs[i].out->relate_scales();
  }
}

void matmul_float(FloatKind kind, const FloatTask& whole) {
  const FloatFn run = kernels().floats[static_cast<int>(kind)];
  const int64_t size = kind == FloatKind::kFloat32 ? 4 : 2;
  const int64_t row_bytes = max64(whole.columns * size, 1);
  const int64_t share = whole.rows * row_bytes / (8 * num_threads());
  const int64_t rows_per_task = max64(1, min64(kTaskBytes, share) / row_bytes / 4) * 4;
  const int64_t tokens_per_task = 48;
  const int64_t row_chunks = div_up(whole.rows, rows_per_task);
  const int64_t token_chunks = div_up(whole.tokens, tokens_per_task);
  parallel_for(row_chunks * token_chunks, [&](int64_t task) {
    const int64_t row = task % row_chunks * rows_per_task;
    const int64_t token = task / row_chunks * tokens_per_task;
    FloatTask part = whole;
    part.weight = static_cast<const char*>(whole.weight) + row * whole.weight_stride * size;
    part.x = whole.x + token * whole.x_stride;
    part.out = whole.out + token * whole.out_stride + row;
    part.rows = min64(rows_per_task, whole.rows - row);
    part.tokens = min64(tokens_per_task, whole.tokens - token);
    run(part);
  });
}

}  // namespace minisgl
