// The thread pool: every task once, whoever calls, however many threads, asleep or spinning. (Forks
// are tested from Python: qemu's user mode cannot start threads in a forked child.)
#include "pool.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "test.h"

namespace minisgl_test {
namespace {

// True if each of `tasks` tasks ran once, and what they wrote is seen. The counts are no atomics:
// the pool alone orders the writes before the reads.
bool runs_each_once(int64_t tasks) {
  std::vector<int> count(static_cast<size_t>(tasks));
  parallel_for(tasks, [&](int64_t i) { ++count[i]; });
  for (const int times : count) {
    if (times != 1) return false;
  }
  return true;
}

void test_counts(Family& family, int64_t rounds) {
  Random random(7);
  for (const int64_t spin : {0, 50}) {
    set_spin_us(spin);
    for (const int threads : {1, 2, 3, 8, 2}) {
      set_num_threads(threads);
      for (int64_t round = 0; round < rounds; ++round) {
        ++family.cases;
        family.check(runs_each_once(random.between(0, 40)), "a task ran twice or never");
      }
    }
  }
}

void test_nesting(Family& family) {
  set_num_threads(3);
  std::vector<int> sums(20);
  parallel_for(20, [&](int64_t i) { parallel_for(10, [&](int64_t j) { sums[i] += j; }); });
  ++family.cases;
  for (const int sum : sums) family.check(sum == 45, "tasks within a task");
}

// The caller is held up in its first task until the worker has done all others: its own run, then
// those of the caller from the end.
void test_stealing(Family& family) {
  set_num_threads(2);
  std::atomic<int64_t> count{0};
  std::vector<int64_t> order(10);
  parallel_for(10, [&](int64_t i) {
    if (i > 0) order[count++] = i;
    while (i == 0 && count < 9) std::this_thread::yield();
  });
  ++family.cases;
  const std::vector<int64_t> wanted{5, 6, 7, 8, 9, 4, 3, 2, 1, 0};
  family.check(order == wanted, "tasks were not stolen from the end");
}

// The caller has nothing left to do while the worker is in its task: it must wait.
void test_waiting(Family& family) {
  set_num_threads(2);
  for (int round = 0; round < 10; ++round) {
    std::atomic<bool> started{false}, left{false};
    int written = 0;
    parallel_for(2, [&](int64_t i) {
      if (i == 0) {
        while (!started) std::this_thread::yield();
        left = true;
        return;
      }
      started = true;
      while (!left) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      written = 1;
    });
    ++family.cases;
    family.check(written == 1, "a call returned before its last task");
  }
}

void test_many_callers(Family& family) {
  set_num_threads(3);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) wrong += !runs_each_once(17);
    });
  }
  for (int change = 0; change < 20; ++change) set_num_threads(1 + change % 4);
  for (std::thread& caller : callers) caller.join();
  ++family.cases;
  family.check(wrong == 0, "callers of several threads");
}

// A number of steps; no two at a time, none after it is forgotten or has said that it is done.
class Steps : public IdleWork {
 public:
  explicit Steps(int most) : most_(most) {}
  bool step() override {
    if (inside_.exchange(true) || forgotten) wrong = true;
    ++count;
    std::this_thread::sleep_for(std::chrono::microseconds(10));  // for others to come in between
    inside_ = false;
    return count < most_;
  }
  std::atomic<int> count{0};
  std::atomic<bool> forgotten{false}, wrong{false};

 private:
  const int most_;
  std::atomic<bool> inside_{false};
};

void test_idle(Family& family) {
  using std::chrono::milliseconds;
  set_spin_us(100);
  set_num_threads(4);
  family.cases += 2;
  const auto some = std::make_shared<Steps>(1000);
  when_idle(some);
  for (int round = 0; some->count < 1000 && round < 30000; ++round) {
    family.check(runs_each_once(17), "tasks beside idle work");
    std::this_thread::sleep_for(milliseconds(1));  // longer than they spin: tasks wake them
  }
  runs_each_once(17);
  std::this_thread::sleep_for(milliseconds(5));
  family.check(some->count == 1000 && !some->wrong, "idle work was not done once, step by step");
  const auto endless = std::make_shared<Steps>(1 << 30);
  when_idle(endless);
  for (int round = 0; endless->count < 100 && round < 30000; ++round) {
    runs_each_once(17);
    std::this_thread::sleep_for(milliseconds(1));
  }
  forget_idle(some.get());  // not the one that is there
  const int before = endless->count;
  std::this_thread::sleep_for(milliseconds(5));
  family.check(endless->count > before, "what was not forgotten stopped");
  forget_idle(endless.get());
  endless->forgotten = true;
  runs_each_once(17);
  std::this_thread::sleep_for(milliseconds(5));
  family.check(!endless->wrong, "idle work went on after it was forgotten");
}

}  // namespace

void test_pool(Family& family) {
  const int64_t spin = spin_us();
  test_counts(family, 100);
  test_nesting(family);
  test_stealing(family);
  test_waiting(family);
  test_many_callers(family);
  test_idle(family);
  set_spin_us(spin);
}

}  // namespace minisgl_test
