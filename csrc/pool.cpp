#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace minisgl {
namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// A ticket packs generation, number of tasks and next index into one word, so that claiming a
// task and knowing that it belongs to the current job are one compare-and-swap. The job's fields
// may be read after a successful claim: they do not change until that task has been counted done.
constexpr int kIndexBits = 24;
constexpr uint64_t kIndexMask = (1ull << kIndexBits) - 1;

inline uint64_t ticket_next(uint64_t ticket) { return ticket & kIndexMask; }
inline uint64_t ticket_size(uint64_t ticket) { return ticket >> kIndexBits & kIndexMask; }
inline bool has_work(uint64_t ticket) { return ticket_next(ticket) < ticket_size(ticket); }

std::atomic<int64_t> g_spin_us{200};
std::atomic<int> g_num_threads{1};

class Pool {
 public:
  explicit Pool(int num_threads) {
    try {
      for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      // The system grants no more threads: go on with those we have.
    }
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      stopping_.store(true);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  void run(uint64_t num_tasks, TaskFn fn, void* context) {
    fn_ = fn;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> 2 * kIndexBits) + 1;
    // Sequentially consistent with `sleepers_`: either we see a sleeper, or it sees the work.
    ticket_.store(generation << 2 * kIndexBits | num_tasks << kIndexBits);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      wake_.notify_all();
    }
    while (take_one()) {
    }
    for (int i = 0; done_.load(std::memory_order_acquire) < num_tasks; ++i) {
      if (i < 20000) {
        relax();
      } else {
        sched_yield();  // a worker was put aside in the middle of a task: let it run
      }
    }
  }

 private:
  bool take_one() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (has_work(ticket)) {
      if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
        fn_(context_, static_cast<int64_t>(ticket_next(ticket)));
        done_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
    return false;
  }

  void work() {
    using Clock = std::chrono::steady_clock;
    while (!stopping_.load(std::memory_order_relaxed)) {
      const auto limit = Clock::now() + std::chrono::microseconds(g_spin_us.load());
      bool worked = false;
      while (!worked && Clock::now() < limit) {
        for (int i = 0; i < 64 && !worked; ++i) {
          worked = take_one();
          relax();
        }
      }
      if (worked) continue;
      std::unique_lock<std::mutex> lock(sleep_mutex_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, [this] { return stopping_.load() || has_work(ticket_.load()); });
      sleepers_.fetch_sub(1);
    }
  }

  // Each of these is written by one side while the other polls: a cache line for each.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint64_t> done_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  TaskFn fn_ = nullptr;
  void* context_ = nullptr;
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

struct Shared {
  std::mutex busy;       // held by the caller whose job the workers run
  Pool* pool = nullptr;  // never freed at exit; forgotten in a forked child
};

Shared* g_shared = nullptr;

void forget_after_fork() { g_shared = new Shared; }

Shared& shared() {
  static const bool ready = [] {
    g_shared = new Shared;
    pthread_atfork(nullptr, nullptr, forget_after_fork);
    return true;
  }();
  (void)ready;
  return *g_shared;
}

thread_local bool t_inside = false;

void run_alone(int64_t num_tasks, TaskFn fn, void* context) {
  for (int64_t i = 0; i < num_tasks; ++i) fn(context, i);
}

}  // namespace

void run_tasks(int64_t num_tasks, TaskFn fn, void* context) {
  const bool fits = num_tasks > 1 && num_tasks <= static_cast<int64_t>(kIndexMask);
  if (!fits || num_threads() == 1 || t_inside) return run_alone(num_tasks, fn, context);
  Shared& state = shared();
  std::unique_lock<std::mutex> busy(state.busy, std::try_to_lock);
  if (!busy) return run_alone(num_tasks, fn, context);
  if (state.pool == nullptr) state.pool = new Pool(num_threads());
  t_inside = true;
  state.pool->run(static_cast<uint64_t>(num_tasks), fn, context);
  t_inside = false;
}

void set_num_threads(int num_threads) {
  Shared& state = shared();
  std::lock_guard<std::mutex> busy(state.busy);
  if (num_threads == g_num_threads.load()) return;
  if (state.pool != nullptr) {
    state.pool->stop();
    delete state.pool;
    state.pool = nullptr;
  }
  g_num_threads.store(num_threads);
}

int num_threads() { return g_num_threads.load(std::memory_order_relaxed); }

void set_spin_us(int64_t microseconds) { g_spin_us.store(microseconds); }
int64_t spin_us() { return g_spin_us.load(); }

}  // namespace minisgl
