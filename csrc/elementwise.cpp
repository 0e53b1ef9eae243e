// Which row kernels are in force, and the parts of sampling that look at a whole vocabulary.
#include "elementwise.h"

#include <algorithm>
#include <cstring>
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

constexpr int kBinBits = 12;  // sign, exponent and three bits of the fraction
constexpr int kNumBins = 1 << kBinBits;
constexpr int kBinShift = 32 - kBinBits;

// The least key such that at most the elements of one bin beyond the k largest reach it.
uint32_t threshold(const float* x, int64_t n, int64_t k) {
  std::vector<int32_t> count(kNumBins);
  for (int64_t i = 0; i < n; ++i) ++count[sort_key(x[i]) >> kBinShift];
  int64_t found = 0;
  int bin = kNumBins;
  while (bin > 1 && found < k) found += count[--bin];
  const uint32_t least = static_cast<uint32_t>(bin) << kBinShift;
  return least > 0 ? least : 1;  // 0 is NaN
}

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
  const uint32_t least = threshold(x, n, k);
  // Falling key, then rising index: one integer comparison.
  std::vector<uint64_t> found;
  found.reserve(static_cast<size_t>(2 * k));
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = sort_key(x[i]);
    if (key >= least) found.push_back(static_cast<uint64_t>(~key) << 32 | static_cast<uint64_t>(i));
  }
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
