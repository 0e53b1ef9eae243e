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
constexpr int64_t kMaxJobs = 16;

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

// How one job is cut: panel chunks times chunks of token tiles.
struct Cut {
  int64_t panels_per_task, panel_chunks, token_chunks;

  int64_t tasks() const { return panel_chunks * token_chunks; }
};

// How much weight a task reads when there is `total` of it. Some eight tasks per thread even out
// what other processes take, more where a task is long because it has many tokens.
int64_t task_bytes(int64_t total, const Activations& x) {
  const int64_t tasks = (x.tokens() < kManyTokens ? 8 : 16) * num_threads();
  return min64(kTaskBytes, max64(total / tasks, 1));
}

Cut cut_job(const PackedView& weight, int64_t tiles, int64_t bytes) {
  // Panels go in pairs because kernels may take two at once.
  const int64_t pairs = max64(1, bytes / (2 * max64(weight.panel_bytes(), 1)));
  Cut cut;
  cut.panels_per_task = 2 * pairs;
  cut.panel_chunks = div_up(weight.panels(), cut.panels_per_task);
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

void run_packed(const Activations& x, const PackedJob& job, const Cut& cut, int64_t task) {
  const int64_t first = task % cut.panel_chunks * cut.panels_per_task;
  const int64_t first_tile = task / cut.panel_chunks * kTilesPerTask;
  const int64_t panels = min64(cut.panels_per_task, job.weight.panels() - first);
  const int64_t end = min64(first_tile + kTilesPerTask, x.tiles());
  for (int64_t tile = first_tile; tile < end; ++tile) {
    float* out = job.out + tile * kTileTokens * job.out_stride + first * kPanelRows;
    run_panels(job.weight, first, panels, x.tile(tile), out, job.out_stride);
  }
}

}  // namespace

void matmul_packed(const Activations& x, const PackedJob* jobs, int num_jobs) {
  for (; num_jobs > kMaxJobs; jobs += kMaxJobs, num_jobs -= kMaxJobs) {
    matmul_packed(x, jobs, kMaxJobs);
  }
  int64_t total_bytes = 0;
  for (int i = 0; i < num_jobs; ++i) total_bytes += jobs[i].weight.bytes();
  Cut cuts[kMaxJobs];
  int64_t num_tasks = 0;
  for (int i = 0; i < num_jobs; ++i) {
    cuts[i] = cut_job(jobs[i].weight, x.tiles(), task_bytes(total_bytes, x));
    num_tasks += cuts[i].tasks();
  }
  parallel_for(num_tasks, [&](int64_t task) {
    int i = 0;
    for (; task >= cuts[i].tasks(); ++i) task -= cuts[i].tasks();
    run_packed(x, jobs[i], cuts[i], task);
  });
}

void matmul_gated(const Activations& x, const PackedView& gate, const PackedView& up,
                  GateFn combine, Activations* out) {
  constexpr int64_t kPanels = kGroup / kPanelRows;  // that make one group of the output
  constexpr int64_t kFloats = kTileTokens * kGroup;                 // of gate, and of up, at once
  const int64_t groups = gate.rows / kGroup;
  const int64_t group_bytes = kPanels * (gate.panel_bytes() + up.panel_bytes());
  const int64_t per_task = max64(1, task_bytes(groups * group_bytes, x) / group_bytes);
  const int64_t chunks = div_up(groups, per_task);
  parallel_for(chunks * div_up(x.tiles(), kTilesPerTask), [&](int64_t task) {
    alignas(64) float gates[kFloats], ups[kFloats];
    const int64_t first = task % chunks * per_task, end = min64(first + per_task, groups);
    const int64_t first_tile = task / chunks * kTilesPerTask;
    const int64_t end_tile = min64(first_tile + kTilesPerTask, x.tiles());
    for (int64_t index = first_tile; index < end_tile; ++index) {
      const ActivationTile tile = x.tile(index);
      const int64_t token = index * kTileTokens, fitting = kFloats / (tile.stride * kGroup);
      for (int64_t g = first; g < end; g += fitting) {
        const int64_t count = min64(fitting, end - g), width = count * kGroup;
        run_panels(gate, g * kPanels, count * kPanels, tile, gates, width);
        run_panels(up, g * kPanels, count * kPanels, tile, ups, width);
        combine(gates, ups, tile.stride * width, gates);
        out->quantize_part(gates, width, token, token + tile.stride, g, g + count);
      }
    }
  });
  out->relate_scales();
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
