// Which row kernels are in force, and the parts of sampling that look at a whole vocabulary.
#include "elementwise.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "isa.h"

namespace minisgl {
namespace {

// Floats in the order of unsigned integers: zeros are equal, NaNs of either sign at the bottom.
uint32_t sort_key(float value) {
  uint32_t bits;
  value += 0.0f;  // -0 becomes 0
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

constexpr int64_t kLanes = 16;

// The row in sections whose lanes each keep their largest element: the k-th largest of those is no
// larger than the k-th largest of the row.
class Sections {
 public:
  Sections(const float* x, int64_t n, int64_t k) {
    // About eight lanes for each element that is wanted, so that few others pass.
    steps_ = std::max<int64_t>(1, n / (8 * k));
    steps_ = std::min<int64_t>(steps_, 64);
    count_ = n / (kLanes * steps_);
    if (count_ * kLanes < 2 * k) count_ = 0;  // nearly all are wanted: look at each
    maxima_.resize(static_cast<size_t>(count_ * kLanes));
    elementwise_kernels().lane_maxima(x, count_, steps_, maxima_.data());
    if (count_ == 0) return;
    std::vector<float> sorted = maxima_;
    std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<float>());
    least_ = std::max<uint32_t>(1, sort_key(sorted[static_cast<size_t>(k - 1)]));
  }

  // Elements with a smaller key are not among the k largest; 0 is the key of NaNs.
  uint32_t least() const { return least_; }

  // Calls visit(i) for every element that may reach least().
  template <class Visit>
  void each(int64_t n, Visit&& visit) const {
    for (int64_t s = 0; s < count_; ++s) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        if (sort_key(maxima_[static_cast<size_t>(s * kLanes + lane)]) < least_) continue;
        for (int64_t i = s * steps_; i < (s + 1) * steps_; ++i) visit(i * kLanes + lane);
      }
    }
    for (int64_t i = count_ * steps_ * kLanes; i < n; ++i) visit(i);
  }

 private:
  int64_t steps_ = 1, count_ = 0;
  uint32_t least_ = 1;
  std::vector<float> maxima_;
};

}  // namespace

const ElementwiseKernels& elementwise_kernels() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return elementwise_kernels_avx512();
    case Isa::kAvxVnni:
    case Isa::kAvx2:
      return elementwise_kernels_avx2();
#elif defined(__aarch64__)
    case Isa::kNeon:
      return elementwise_kernels_neon();
#endif
    default:
      return elementwise_kernels_portable();
  }
}

int64_t top_candidates(const float* x, int64_t n, int64_t k, float* values, int32_t* indices) {
  if (k <= 0) return 0;
  const Sections sections(x, n, k);
  // Falling key, then rising index: one integer comparison.
  std::vector<uint64_t> found;
  found.reserve(static_cast<size_t>(2 * k));
  sections.each(n, [&](int64_t i) {
    const uint32_t key = sort_key(x[i]);
    if (key < sections.least()) return;
    found.push_back(static_cast<uint64_t>(~key) << 32 | static_cast<uint64_t>(i));
  });
  const int64_t count = std::min<int64_t>(k, static_cast<int64_t>(found.size()));
  if (count < static_cast<int64_t>(found.size())) {
    std::nth_element(found.begin(), found.begin() + count, found.end());
  }
  std::sort(found.begin(), found.begin() + count);
  for (int64_t i = 0; i < count; ++i) {
    indices[i] = static_cast<int32_t>(found[i] & 0xffffffffu);
    values[i] = x[indices[i]];
  }
  return count;
}

void apply_penalties(float* logits, int64_t n, const Penalties& p) {
  if (p.repetition != 1.0f && p.seen != nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      if (!p.seen[i]) continue;
      logits[i] = logits[i] > 0.0f ? logits[i] / p.repetition : logits[i] * p.repetition;
    }
  }
  if ((p.frequency != 0.0f || p.presence != 0.0f) && p.counts != nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      if (p.counts[i] == 0) continue;
      logits[i] -= p.frequency * static_cast<float>(p.counts[i]);
      logits[i] -= p.counts[i] > 0 ? p.presence : 0.0f;
    }
  }
}

}  // namespace minisgl
