// How a product is cut into tasks; the kernels themselves are in matmul_<isa>.cpp.
#include "matmul.h"

#include "isa.h"
#include "pool.h"

namespace minisgl {
namespace {

// A task reads at most this much weight, so that it stays in the second-level cache while the
// tiles of many tokens pass over it.
constexpr int64_t kTaskBytes = 256 << 10;
constexpr int64_t kTilesPerTask = 8;  // 256 tokens
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

Cut cut_job(const PackedView& weight, int64_t tiles, int64_t total_bytes) {
  // About eight tasks per thread even out what other processes take; panels go in pairs because
  // kernels may take two at once.
  const int64_t share = total_bytes / (8 * num_threads());
  const int64_t bytes = min64(kTaskBytes, max64(share, 1));
  const int64_t pairs = max64(1, bytes / (2 * max64(weight.panel_bytes(), 1)));
  Cut cut;
  cut.panels_per_task = 2 * pairs;
  cut.panel_chunks = div_up(weight.panels(), cut.panels_per_task);
  cut.token_chunks = div_up(tiles, kTilesPerTask);
  return cut;
}

void run_packed(const Activations& x, const PackedJob& job, const Cut& cut, int64_t task) {
  const int64_t first = task % cut.panel_chunks * cut.panels_per_task;
  const int64_t first_tile = task / cut.panel_chunks * kTilesPerTask;
  PanelTask work;
  work.panel_bytes = job.weight.panel_bytes();
  work.weight = job.weight.data + first * work.panel_bytes;
  work.groups = job.weight.groups();
  work.panels = min64(cut.panels_per_task, job.weight.panels() - first);
  work.rows = min64(work.panels * kPanelRows, job.weight.rows - first * kPanelRows);
  work.out_stride = job.out_stride;
  const PanelFn run = kernels().packed[static_cast<int>(job.weight.format)];
  const int64_t end = min64(first_tile + kTilesPerTask, x.tiles());
  for (int64_t tile = first_tile; tile < end; ++tile) {
    work.x = x.tile(tile);
    work.out = job.out + tile * kTileTokens * job.out_stride + first * kPanelRows;
    run(work);
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
    cuts[i] = cut_job(jobs[i].weight, x.tiles(), total_bytes);
    num_tasks += cuts[i].tasks();
  }
  parallel_for(num_tasks, [&](int64_t task) {
    int i = 0;
    for (; task >= cuts[i].tasks(); ++i) task -= cuts[i].tasks();
    run_packed(x, jobs[i], cuts[i], task);
  });
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
