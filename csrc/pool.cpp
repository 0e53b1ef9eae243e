#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
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

// Each thread has a queue of its own, tasks [next, end) packed into one word, and takes from its
// front; a thread that has run out takes from the back of the others'. Claiming a task is one
// compare-and-swap, and a claim that succeeds belongs to the current job: the job's fields may be
// read after it, for they do not change until that task has been counted done.
constexpr int kIndexBits = 32;

inline uint64_t make_queue(uint64_t next, uint64_t end) { return next << kIndexBits | end; }
inline uint64_t queue_next(uint64_t queue) { return queue >> kIndexBits; }
inline uint64_t queue_end(uint64_t queue) { return queue & 0xffffffffu; }
inline bool has_work(uint64_t queue) { return queue_next(queue) < queue_end(queue); }

struct alignas(64) Queue {
  std::atomic<uint64_t> tasks{0};
};

std::atomic<int64_t> g_spin_us{1000};
std::atomic<int> g_num_threads{1};

// What idle workers do. Apart from the pool, which comes and goes with the number of threads.
struct Idle {
  std::mutex mutex;  // held for a step
  std::shared_ptr<IdleWork> work;
  std::atomic<bool> wanted{false};

  void set(std::shared_ptr<IdleWork> next) {
    std::lock_guard<std::mutex> lock(mutex);
    work.swap(next);
    wanted.store(work != nullptr);
  }

  // Whether there may be more to do.
  bool step() {
    if (!wanted.load(std::memory_order_relaxed)) return false;
    std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
    if (!lock || !work) return false;
    if (!work->step()) wanted.store(false);
    return true;
  }
};

class Pool {
 public:
  Pool(int num_threads, Idle* idle)
      : queues_(static_cast<size_t>(num_threads)), idle_(idle) {
    try {
      for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i); });
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
    // Neighbouring tasks go to one thread, which then reads one straight line of memory.
    // Sequentially consistent with `sleepers_`: either we see a sleeper, or it sees the work.
    const uint64_t num_queues = queues_.size();
    for (uint64_t i = num_queues; i-- > 0;) {
      const uint64_t next = num_tasks * i / num_queues, end = num_tasks * (i + 1) / num_queues;
      queues_[i].tasks.store(make_queue(next, end));
    }
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      wake_.notify_all();
    }
    take_all(0);
    for (int i = 0; done_.load(std::memory_order_acquire) < num_tasks; ++i) {
      if (i < 20000) {
        relax();
      } else {
        sched_yield();  // a worker was put aside in the middle of a task: let it run
      }
    }
  }

 private:
  // Runs one task of a queue: its first for the owner, its last for others.
  bool take_one(Queue& queue, bool is_own) {
    uint64_t tasks = queue.tasks.load(std::memory_order_acquire);
    while (has_work(tasks)) {
      const uint64_t next = queue_next(tasks), end = queue_end(tasks);
      const uint64_t rest = is_own ? make_queue(next + 1, end) : make_queue(next, end - 1);
      if (queue.tasks.compare_exchange_weak(tasks, rest, std::memory_order_acq_rel)) {
        fn_(context_, static_cast<int64_t>(is_own ? next : end - 1));
        return true;
      }
    }
    return false;
  }

  // Runs what is left, own tasks first; whether there was anything.
  bool take_all(size_t self) {
    uint64_t count = 0;
    while (take_one(queues_[self], true)) ++count;
    for (size_t i = 1; i < queues_.size(); ++i) {
      while (take_one(queues_[(self + i) % queues_.size()], false)) ++count;
    }
    if (count > 0) done_.fetch_add(count, std::memory_order_release);
    return count > 0;
  }

  bool any_work() const {
    for (const Queue& queue : queues_) {
      if (has_work(queue.tasks.load())) return true;
    }
    return false;
  }

  void work(int self) {
    using Clock = std::chrono::steady_clock;
    while (!stopping_.load(std::memory_order_relaxed)) {
      const auto spin = std::chrono::microseconds(g_spin_us.load());
      auto limit = Clock::now() + spin;
      bool worked = false;
      while (!worked && Clock::now() < limit) {
        const bool stepped = idle_->step();
        if (stepped) limit = Clock::now() + spin;
        for (int i = 0; i < (stepped ? 1 : 64) && !worked; ++i) {
          worked = take_all(static_cast<size_t>(self));
          relax();
        }
      }
      if (worked) continue;
      std::unique_lock<std::mutex> lock(sleep_mutex_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, [this] { return stopping_.load() || any_work(); });
      sleepers_.fetch_sub(1);
    }
  }

  // Each of these is written by one side while the other polls: a cache line for each.
  std::vector<Queue> queues_;
  Idle* idle_;
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
  Idle idle;
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
  const bool fits = num_tasks > 1 && num_tasks < int64_t{1} << kIndexBits;
  if (!fits || num_threads() == 1 || t_inside) return run_alone(num_tasks, fn, context);
  Shared& state = shared();
  std::unique_lock<std::mutex> busy(state.busy, std::try_to_lock);
  if (!busy) return run_alone(num_tasks, fn, context);
  if (state.pool == nullptr) state.pool = new Pool(num_threads(), &state.idle);
  t_inside = true;
  state.pool->run(static_cast<uint64_t>(num_tasks), fn, context);
  t_inside = false;
}

void when_idle(std::shared_ptr<IdleWork> work) { shared().idle.set(std::move(work)); }

void forget_idle(const IdleWork* work) {
  Idle& idle = shared().idle;
  std::lock_guard<std::mutex> lock(idle.mutex);
  if (idle.work.get() == work) idle.work.reset();
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
