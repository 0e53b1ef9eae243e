#include "activations.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "format.h"
#include "isa.h"
#include "pool.h"

namespace minisgl {
namespace {

constexpr int64_t kAlign = 64;
constexpr int64_t round_up(int64_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

// Below this the reciprocal of the scale could overflow; such a group counts as zero.
constexpr float kSmallest = 1e-30f;

GroupResult quantize_group(const float* x, int8_t* codes) {
  // Bit patterns of absolute values order like the values, with infinity and NaN on top.
  uint32_t largest = 0;
  for (int i = 0; i < kGroup; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffffu;
    if (bits > largest) largest = bits;
  }
  float amax;
  std::memcpy(&amax, &largest, 4);
  if (largest >= 0x7f800000u || amax < kSmallest) {
    std::memset(codes, 0, kGroup);
    return {amax < kSmallest ? 0.0f : NAN, 0, 0};
  }
  const float inverse = 127.0f / amax;
  int32_t sums[2] = {0, 0};
  for (int i = 0; i < kGroup; ++i) {
    const int32_t code = static_cast<int32_t>(std::nearbyintf(x[i] * inverse));
    codes[i] = static_cast<int8_t>(code);
    sums[i / 16] += code;
  }
  return {amax / 127.0f, sums[0], sums[1]};
}

QuantizeGroupFn choose() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx512:
    case Isa::kAvxVnni:
    case Isa::kAvx2:
      return quantize_group_avx2();
#endif
    default:
      return quantize_group_portable();
  }
}

}  // namespace

QuantizeGroupFn quantize_group_portable() { return quantize_group; }

void Activations::Free::operator()(uint8_t* p) const { std::free(p); }

Activations::Activations(int64_t tokens, int64_t columns)
    : tokens_(tokens), columns_(columns), groups_((columns + kGroup - 1) / kGroup) {
  const int64_t n = tokens_ * groups_;
  scale_offset_ = round_up(n * kGroup);
  sum_offset_ = scale_offset_ + round_up(n * 4);
  correction_offset_ = sum_offset_ + round_up(n * 4);
  const int64_t total = correction_offset_ + kNumCorrections * round_up(n * 4);
  memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(kAlign, total + kAlign)));
  if (!memory_) throw std::bad_alloc();
}

int64_t Activations::tile_tokens(int64_t tile) const {
  const int64_t left = tokens_ - tile * kTileTokens;
  return left < kTileTokens ? left : kTileTokens;
}

ActivationTile Activations::tile(int64_t tile) const {
  const int64_t first = tile * kTileTokens * groups_;
  const int64_t plane = round_up(tokens_ * groups_ * 4);
  ActivationTile result;
  result.codes = at<int8_t>(first * kGroup);
  result.scale = at<float>(scale_offset_) + first;
  result.scaled_sum = at<float>(sum_offset_) + first;
  for (int i = 0; i < kNumCorrections; ++i) {
    result.correction[i] = at<int32_t>(correction_offset_ + i * plane) + first;
  }
  result.stride = tile_tokens(tile);
  return result;
}

void Activations::quantize_token(int64_t token, const float* row) {
  const QuantizeGroupFn quantize_one = choose();
  const ActivationTile out = tile(token / kTileTokens);
  int64_t at = token % kTileTokens;
  for (int64_t g = 0; g < groups_; ++g, at += out.stride) {
    const float* source = row + g * kGroup;
    float padded[kGroup] = {};
    const int64_t left = columns_ - g * kGroup;
    if (left < kGroup) {
      std::memcpy(padded, source, static_cast<size_t>(left) * 4);
      source = padded;
    }
    int8_t* codes = const_cast<int8_t*>(out.codes) + at * kGroup;
    const GroupResult r = quantize_one(source, codes);
    const int32_t sum = r.low_sum + r.high_sum;
    const_cast<float*>(out.scale)[at] = r.scale;
    const_cast<float*>(out.scaled_sum)[at] = r.scale * static_cast<float>(sum);
    const int32_t corrections[kNumCorrections] = {-8 * sum, -16 * sum, -128 * sum,
                                                  -32 * r.low_sum, -32 * r.high_sum};
    for (int i = 0; i < kNumCorrections; ++i) {
      const_cast<int32_t*>(out.correction[i])[at] = corrections[i];
    }
  }
}

void Activations::quantize(const float* x, int64_t stride) {
  if (tokens_ == 0) return;
  // A task of a few hundred groups outweighs what it costs to hand it out.
  const int64_t chunk = tokens_ * groups_ < 2048 ? tokens_ : 1 + 512 / groups_;
  parallel_for((tokens_ + chunk - 1) / chunk, [&](int64_t task) {
    const int64_t end = (task + 1) * chunk < tokens_ ? (task + 1) * chunk : tokens_;
    for (int64_t token = task * chunk; token < end; ++token) {
      quantize_token(token, x + token * stride);
    }
  });
}

}  // namespace minisgl
