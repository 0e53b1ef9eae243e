// The loop of quantisation, around what an instruction set does with one group of 32 columns.
// Everything is in an unnamed namespace: code compiled for one instruction set must never be merged
// by the linker with that of another.
#pragma once

#include <cstring>

#include "activations.h"
#include "format.h"

namespace minisgl {
namespace {

// Below this the reciprocal of the scale could overflow; such a group counts as zero.
constexpr float kSmallest = 1e-30f;

struct GroupResult {
  float scale;
  int32_t low_sum, high_sum;
};

// A group without codes: too small, or with a NaN or an infinity (`bits` of the largest magnitude).
inline __attribute__((always_inline)) GroupResult empty_group(float amax, int8_t* codes) {
  std::memset(codes, 0, kGroup);
  return {amax < kSmallest ? 0.0f : __builtin_nanf(""), 0, 0};
}

template <class Group>
inline __attribute__((always_inline)) void quantize_groups(const QuantizeTask& task,
                                                           Group&& group) {
  const ActivationTile& out = task.out;
  for (int64_t g = 0; g < task.groups; ++g) {
    const int64_t left = task.columns - g * kGroup;
    for (int64_t t = 0; t < task.tokens; ++t) {
      const int64_t at = g * out.stride + t;
      const float* source = task.x + t * task.x_stride + g * kGroup;
      float padded[kGroup];
      if (left < kGroup) {
        std::memset(padded, 0, sizeof(padded));
        std::memcpy(padded, source, static_cast<size_t>(left) * sizeof(float));
        source = padded;
      }
      const GroupResult r = group(source, out.codes + at * kGroup);
      const int32_t sum = r.low_sum + r.high_sum;
      out.scale[at] = r.scale;
      out.scaled_sum[at] = r.scale * static_cast<float>(sum);
      out.minus_sum[kWholeSum][at] = -sum * (1 << kWholeOffsetBits);
      out.minus_sum[kLowSum][at] = -r.low_sum * (1 << kHalfOffsetBits);
      out.minus_sum[kHighSum][at] = -r.high_sum * (1 << kHalfOffsetBits);
      out.start[at] = sum_start(sum);
    }
  }
}

// A factor of 32,767 stands for 32,767 / 32,768 in a product that is shifted down by 15 bits.
constexpr float kMaxFactor = 32767;

// The loops over tokens are for the compiler to vectorise, or to leave out; kTokens: the stride if
// it is known.
template <int64_t kTokens>
inline void relate_tokens(const ActivationTile& x, int64_t groups) {
  const int64_t tokens = kTokens > 0 ? kTokens : x.stride;
  for (int64_t first = 0; first < groups; first += kSpan) {
    const int64_t end = first + kSpan < groups ? first + kSpan : groups;
    float largest[kTileTokens] = {}, total[kTileTokens] = {}, inverse[kTileTokens];
    for (int64_t g = first; g < end; ++g) {
      const float* scale = x.scale + g * tokens;
      for (int64_t t = 0; t < tokens; ++t) {
        largest[t] = scale[t] > largest[t] ? scale[t] : largest[t];
        total[t] += scale[t];  // NaN if one of them is
      }
    }
    float* units = x.unit + first / kSpan * tokens;
    for (int64_t t = 0; t < tokens; ++t) {
      const float unit = largest[t] * (32768.0f / kMaxFactor);
      inverse[t] = largest[t] > 0 ? kMaxFactor / largest[t] : 0.0f;
      units[t] = total[t] == total[t] ? unit : total[t];
    }
    for (int64_t g = first; g < end; ++g) {
      const float* scale = x.scale + g * tokens;
      int32_t* factor = x.factor + g * tokens;
      for (int64_t t = 0; t < tokens; ++t) {
        const float value = scale[t] > 0 ? scale[t] * inverse[t] : 0.0f;
        factor[t] = static_cast<int32_t>(value + 0.5f) * 0x10001;
      }
    }
  }
}

inline void relate_tile(const ActivationTile& x, int64_t groups) {
  x.stride == 1 ? relate_tokens<1>(x, groups) : relate_tokens<0>(x, groups);
}

}  // namespace
}  // namespace minisgl
