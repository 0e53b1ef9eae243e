#include "commit.h"

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#endif

namespace minisgl {
namespace {

constexpr int64_t kBytesAhead = 24 << 20;
constexpr uintptr_t kStepBytes = 16 << 10;  // takes a few microseconds

// False where the system cannot do it.
bool commit([[maybe_unused]] uintptr_t begin, [[maybe_unused]] uintptr_t end) {
#if defined(__linux__)
  return madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE) == 0;
#else
  return false;
#endif
}

uintptr_t page_of(uintptr_t address) {
#if defined(__linux__)
  static const auto size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return address / size * size;
#else
  return address;
#endif
}

}  // namespace

void CommitAhead::add(const void* data, int64_t bytes) {
  if (data == nullptr) return;
  arrays_.push_back({reinterpret_cast<uintptr_t>(data), bytes});
  bytes_ += bytes;
}

void CommitAhead::use(const int32_t* locations, int64_t n) {
  int64_t used = used_.load(std::memory_order_relaxed);
  for (int64_t i = 0; i < n; ++i) {
    if (locations[i] >= used && locations[i] < limit_) used = locations[i] + 1;
  }
  used_.store(used);
}

bool CommitAhead::step() {
  if (array_ == 0 && next_ == 0) {
    if (bytes_ == 0 || is_refused_) return false;
    const int64_t used = used_.load(), ahead = std::max<int64_t>(kBytesAhead / bytes_, 1);
    // In long stretches, so that a page is not visited for every token.
    if (done_ >= std::min(limit_, used + ahead / 2)) return false;
    begin_ = std::max(done_, used);
    end_ = std::min(limit_, used + ahead);
  }
  // The page where a stretch ends is left to the next one, or to whoever writes there.
  const Array& array = arrays_[array_];
  const uintptr_t last = page_of(array.data + static_cast<uintptr_t>(end_ * array.bytes));
  if (next_ == 0) next_ = page_of(array.data + static_cast<uintptr_t>(begin_ * array.bytes));
  const uintptr_t stop = std::min(last, next_ + kStepBytes);
  if (next_ < stop && !commit(next_, stop)) {
    is_refused_ = true;
    array_ = next_ = 0;
    return false;
  }
  next_ = stop;
  if (next_ >= last) {
    next_ = 0;
    if (++array_ == arrays_.size()) {
      array_ = 0;
      done_ = end_;
    }
  }
  return true;
}

}  // namespace minisgl
