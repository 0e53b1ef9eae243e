// How attention is cut into tasks; the kernels themselves are in attention_<isa>.cpp.
//
// A unit is a tile of query tokens over a range of KV heads and splits. Small tiles are one unit,
// which finds keys and values of all heads side by side. Where that gives the threads too little to
// share out, heads, then splits of a tile go to several units; the one that finishes last merges
// the splits, in order.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "attention_kernels.h"
#include "isa.h"
#include "pool.h"

namespace minisgl {
namespace {

constexpr int64_t kMaxTileQueries = 64;
constexpr int64_t kMinTileQueries = 32;
constexpr int64_t kTasksPerThread = 8;
constexpr int64_t kLoadCost = 6;       // reading a key and a value, in rows computed with them
constexpr int64_t kMinTaskCost = 2048;  // key-rows: a few microseconds
constexpr int64_t kMaxTokensPerStore = 16;
constexpr int64_t kMinTokensPerStore = 4;

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

const AttentionKernels& kernels() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return attention_kernels_avx512();
    case Isa::kAvxVnni:
    case Isa::kAvx2:
      return attention_kernels_avx2();
#elif defined(__aarch64__)
    case Isa::kNeon:
      return attention_kernels_neon();
#endif
    default:
      return attention_kernels_portable();
  }
}

struct Unit {
  int32_t req, first_query, num_queries;
  int32_t first_head, end_head;    // KV heads
  int32_t first_split, end_split;  // of this task
  int32_t tile_first, tile_end;    // of the tile
  int32_t shared;                  // index into Plan::pending, -1 if its splits are one unit
  int64_t partials;                // where the tile's partials start, in floats
};

struct Free {
  void operator()(float* p) const { std::free(p); }
};

// What a call needs, kept by the calling thread so that the next layer finds it warm.
struct Plan {
  std::vector<Unit> units;
  std::vector<int32_t> pending;  // units of shared splits that have not finished
  std::vector<uint8_t> taken;    // working memories in use, one flag per cache line
  int64_t max_rows = 0, partial_floats = 0;
  std::unique_ptr<float, Free> memory;
  int64_t memory_floats = 0;

  float* reserve(int64_t floats) {
    if (floats > memory_floats) {
      memory.reset();
      memory_floats = 0;
      const size_t bytes = static_cast<size_t>(div_up(floats, 1024) * 4096);
      memory.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
      if (memory == nullptr) throw std::bad_alloc();
      memory_floats = div_up(floats, 1024) * 1024;
    }
    return memory.get();
  }
};

thread_local Plan t_plan;

struct Planner {
  const AttentionBatch& batch;
  const AttentionShape& shape;
  Plan* plan;
  int64_t group = shape.num_q_heads / shape.num_kv_heads;
  int64_t target = 0;  // cost that a task should not exceed by much

  int64_t queries(int64_t req) const { return batch.query_start[req + 1] - batch.query_start[req]; }
  int64_t low(int64_t position) const {
    return shape.window > 0 ? max64(0, position - shape.window + 1) : 0;
  }
  // About how much work `count` queries ending before position `end` are, for one KV head.
  int64_t cost(int64_t count, int64_t end) const {
    return (end - low(end - count)) * (kLoadCost * div_up(count, kMaxTileQueries) + count * group);
  }

  void make() {
    int64_t total = 0;
    for (int64_t r = 0; r < batch.num_reqs; ++r) {
      if (queries(r) > 0) total += cost(queries(r), batch.kv_len[r]) * shape.num_kv_heads;
    }
    const int64_t threads = num_threads();
    const int64_t share = max64(kMinTaskCost, total / (threads * kTasksPerThread));
    target = threads == 1 ? int64_t{1} << 60 : share;
    plan->units.clear();
    plan->pending.clear();
    plan->max_rows = plan->partial_floats = 0;
    // The large ones first, and of those the later ones, which see more.
    for (int64_t r = 0; r < batch.num_reqs; ++r) {
      if (queries(r) > 1) add_request(r);
    }
    for (int64_t r = 0; r < batch.num_reqs; ++r) {
      if (queries(r) == 1) add_request(r);
    }
  }

  void add_request(int64_t req) {
    const int64_t count = queries(req), start = batch.kv_len[req] - count;
    int64_t tile = max64(1, min64(kMaxTileQueries, kMaxTileRows / group));
    const int64_t wanted = target / max64(1, batch.kv_len[req] * group);
    tile = min64(tile, max64(wanted, kMinTileQueries));
    // Every thread begins with a run of tasks (pool.h): each run goes from late tiles, which see
    // most, to early ones, which are left for whoever is done first.
    const int64_t runs = num_threads(), last = div_up(count, tile) - 1;
    for (int64_t run = 0; run < runs; ++run) {
      for (int64_t t = last - run; t >= 0; t -= runs) {
        add_tile(req, start, t * tile, min64(tile, count - t * tile));
      }
    }
  }

  void add_tile(int64_t req, int64_t start, int64_t first_query, int64_t count) {
    const int64_t first = start + first_query, end = first + count;
    const int64_t first_split = low(first) / kKeySplit, end_split = div_up(end, kKeySplit);
    const int64_t heads = shape.num_kv_heads, splits = end_split - first_split;
    const int64_t rows = count * group;
    const int64_t wanted = div_up(cost(count, end) * heads, target);
    const int64_t head_parts = min64(heads, wanted);
    const int64_t split_parts = min64(splits, div_up(wanted, head_parts));
    const int64_t shared = static_cast<int64_t>(plan->pending.size());
    for (int64_t p = 0; p < split_parts; ++p) {
      for (int64_t h = 0; h < head_parts; ++h) {
        Unit unit;
        unit.req = static_cast<int32_t>(req);
        unit.first_query = static_cast<int32_t>(first_query);
        unit.num_queries = static_cast<int32_t>(count);
        unit.first_head = static_cast<int32_t>(heads * h / head_parts);
        unit.end_head = static_cast<int32_t>(heads * (h + 1) / head_parts);
        unit.first_split = static_cast<int32_t>(first_split + splits * p / split_parts);
        unit.end_split = static_cast<int32_t>(first_split + splits * (p + 1) / split_parts);
        unit.tile_first = static_cast<int32_t>(first_split);
        unit.tile_end = static_cast<int32_t>(end_split);
        unit.shared = split_parts > 1 ? static_cast<int32_t>(shared + h) : -1;
        unit.partials = plan->partial_floats;
        plan->units.push_back(unit);
      }
    }
    if (split_parts > 1) {
      plan->partial_floats += heads * splits * partial_floats(shape.head_dim, rows);
      plan->pending.insert(plan->pending.end(), static_cast<size_t>(head_parts),
                           static_cast<int32_t>(split_parts));
    }
    plan->max_rows = max64(plan->max_rows, rows);
  }
};

// A free working memory; there are as many as threads.
int64_t take_slot(std::vector<uint8_t>& taken) {
  const int64_t count = static_cast<int64_t>(taken.size() / 64);
  for (int64_t i = 0;; i = (i + 1) % count) {
    uint8_t* flag = &taken[static_cast<size_t>(i * 64)];
    if (__atomic_exchange_n(flag, 1, __ATOMIC_ACQUIRE) == 0) return i;
  }
}

// Calls body(first, count) until all tokens of a store had their turn, in tasks that come out even
// over the threads.
template <class Body>
void share_tokens(int64_t tokens, const Body& body) {
  const int64_t rounds = div_up(tokens, kMaxTokensPerStore * num_threads());
  const int64_t chunks = min64(rounds * num_threads(), max64(1, tokens / kMinTokensPerStore));
  parallel_for(chunks, [&](int64_t chunk) {
    const int64_t first = tokens * chunk / chunks;
    body(first, tokens * (chunk + 1) / chunks - first);
  });
}

}  // namespace

void paged_attention(const AttentionBatch& batch, const AttentionShape& shape, const KVView& kv,
                     const float* q, int64_t q_stride, float* out, int64_t out_stride) {
  Plan& plan = t_plan;
  Planner{batch, shape, &plan}.make();
  if (plan.units.empty()) return;
  const int64_t slot_floats = div_up(scratch_floats(shape.head_dim, plan.max_rows), 64) * 64;
  const int64_t slots = min64(num_threads(), static_cast<int64_t>(plan.units.size()));
  plan.taken.assign(static_cast<size_t>(slots * 64), 0);
  float* memory = plan.reserve(slots * slot_floats + plan.partial_floats);
  float* partials = memory + slots * slot_floats;
  const AttentionKernels& table = kernels();
  const auto run = table.run[static_cast<int>(kv.kind)];
  const int64_t group_floats = shape.num_q_heads / shape.num_kv_heads * shape.head_dim;

  const int64_t count = static_cast<int64_t>(plan.units.size());

  parallel_for(count, [&](int64_t index) {
    const Unit& unit = plan.units[static_cast<size_t>(index)];
    const int64_t slot = take_slot(plan.taken);
    const int64_t queries = batch.query_start[unit.req + 1] - batch.query_start[unit.req];
    const int64_t token = batch.query_start[unit.req] + unit.first_query;
    AttentionTask task;
    task.shape = &shape;
    task.kv = &kv;
    task.locations = batch.rows + unit.req * batch.row_stride;
    task.num_queries = unit.num_queries;
    task.first_position = batch.kv_len[unit.req] - queries + unit.first_query;
    task.q_stride = q_stride;
    task.out_stride = out_stride;
    task.first_split = unit.first_split;
    task.end_split = unit.end_split;
    task.partial_split = unit.tile_first;
    task.next_kv_head = 0;
    task.next_locations = nullptr;
    task.scratch = memory + slot * slot_floats;
    const int64_t splits = unit.tile_end - unit.tile_first;
    const int64_t head_partials = splits * partial_floats(shape.head_dim, task.num_rows());
    const auto each_head = [&](const auto& body) {
      for (int64_t head = unit.first_head; head < unit.end_head; ++head) {
        task.kv_head = head;
        task.q = q + token * q_stride + head * group_floats;
        task.out = out + token * out_stride + head * group_floats;
        task.partials =
            unit.shared < 0 ? nullptr : partials + unit.partials + head * head_partials;
        body();
      }
    };
    each_head([&] {
      const bool more = task.kv_head + 1 < unit.end_head;
      const int64_t follower = more ? index : index + 1;
      task.next_keys = 0;
      if (follower < count) {
        const Unit& next = plan.units[static_cast<size_t>(follower)];
        task.next_kv_head = more ? task.kv_head + 1 : next.first_head;
        const int64_t start = next.first_split * kKeySplit;
        task.next_locations = batch.rows + next.req * batch.row_stride + start;
        task.next_keys = min64(kKeyBlock, batch.kv_len[next.req] - start);
      }
      run(task);
    });
    if (unit.shared >= 0) {
      int32_t* pending = &plan.pending[static_cast<size_t>(unit.shared)];
      if (__atomic_sub_fetch(pending, 1, __ATOMIC_ACQ_REL) == 0) {
        task.first_split = unit.tile_first;
        task.end_split = unit.tile_end;
        each_head([&] { table.merge(task); });
      }
    }
    __atomic_store_n(&plan.taken[static_cast<size_t>(slot * 64)], 0, __ATOMIC_RELEASE);
  });
}

void store_kv(const AttentionShape& shape, const KVStore& kv, const float* k, int64_t k_stride,
              const float* v, int64_t v_stride, const int32_t* out_loc, int64_t tokens) {
  const auto store = kernels().store[static_cast<int>(kv.kind)];
  share_tokens(tokens, [&](int64_t first, int64_t count) {
    store(shape, kv, k + first * k_stride, k_stride, v + first * v_stride, v_stride,
          out_loc + first, count);
  });
}

void rope_and_store(const AttentionShape& shape, const KVStore& kv, const RopeStore& work) {
  const auto rope = kernels().rope[static_cast<int>(kv.kind)];
  share_tokens(work.tokens, [&](int64_t first, int64_t count) {
    RopeStore part = work;
    part.tokens = count;
    part.qkv += first * work.stride;
    part.out_loc += first;
    if (work.positions != nullptr) {
      part.positions += first;
    } else {
      part.cos += first * work.half;
      part.sin += first * work.half;
    }
    rope(shape, kv, part);
  });
}

double probe_float(int64_t steps, int repeats) {
  using Clock = std::chrono::steady_clock;
  const AttentionKernels& table = kernels();
  const int64_t tasks = 16 * num_threads();
  std::atomic<int64_t> sink{0};
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    const auto start = Clock::now();
    parallel_for(tasks, [&](int64_t) { sink += static_cast<int64_t>(table.probe(steps)); });
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, static_cast<double>(2 * table.probe_floats * steps * tasks) / seconds);
  }
  return best;
}

}  // namespace minisgl
