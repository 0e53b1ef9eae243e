// The one thread pool that all native operations share.
//
// parallel_for(n, body) calls body(i) once for each i in [0, n), on the calling thread and the
// workers, in any order; it returns when all have finished. Each thread begins with a straight run
// of tasks and takes them one by one; who has run out takes from the end of the others' runs, so a
// thread that the operating system delays holds up one task, not its share.
// What a task computes must depend on its index alone: that is what makes results independent of
// the number of threads.
//
// A worker that finds nothing spins for a short while (the next operation of a forward pass is
// microseconds away) and then sleeps. If the pool is busy with a call from another thread, or the
// call comes from inside a task, the caller runs its tasks alone.
//
// Fork: a child has no workers; the pool notices and starts new ones at the child's first call.
// Exit: workers sleep on a condition variable that is never destroyed, so there is nothing to join.
#pragma once

#include <cstdint>
#include <memory>

namespace minisgl {

using TaskFn = void (*)(void* context, int64_t index);

void run_tasks(int64_t num_tasks, TaskFn fn, void* context);

template <class Body>
void parallel_for(int64_t num_tasks, Body&& body) {
  run_tasks(
      num_tasks, [](void* context, int64_t i) { (*static_cast<Body*>(context))(i); }, &body);
}

// Something useful for a worker that waits for tasks: one worker at a time calls `step`, which should
// take a few microseconds, again and again until it returns false.
class IdleWork {
 public:
  virtual ~IdleWork() = default;
  virtual bool step() = 0;
};

// There is work to step through; it takes the place of what was there before. Workers that already
// sleep are not woken for it.
void when_idle(std::shared_ptr<IdleWork> work);
// No more steps of `work` once this returns.
void forget_idle(const IdleWork* work);

// Counts the calling thread: 1 means no workers. Must be between 1 and 256.
void set_num_threads(int num_threads);
int num_threads();

// How long an idle worker spins before it sleeps, in microseconds.
void set_spin_us(int64_t microseconds);
int64_t spin_us();

}  // namespace minisgl
