// Memory of a KV pool, asked for before it is written.
//
// The system gives a pool memory when it is first written, page by page, and every page then
// interrupts the forward that wrote it: 3,000 times in a prompt of 512 tokens of a small model, 3 %
// of its time. Idle workers ask for a little of it ahead, behind the locations in use.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "pool.h"

namespace minisgl {

class CommitAhead : public IdleWork {
 public:
  // Locations are [0, limit); those beyond are none of its business.
  explicit CommitAhead(int64_t limit) : limit_(limit) {}

  // An array with `bytes` for each location. All of them come before the first step.
  void add(const void* data, int64_t bytes);

  // These locations, and all below, are in use.
  void use(const int32_t* locations, int64_t n);

  bool step() override;

 private:
  struct Array {
    uintptr_t data;
    int64_t bytes;
  };

  const int64_t limit_;
  int64_t bytes_ = 0;  // for a location
  std::vector<Array> arrays_;
  std::atomic<int64_t> used_{0};
  // Of the worker that steps:
  bool is_refused_ = false;
  int64_t done_ = 0;            // locations asked for
  int64_t begin_ = 0, end_ = 0;  // those in progress; the array, and an address in it or 0
  size_t array_ = 0;
  uintptr_t next_ = 0;
};

}  // namespace minisgl
