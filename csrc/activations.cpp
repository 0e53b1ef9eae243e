#include "activations.h"

#include <cmath>
#include <cstdlib>
#include <new>

#include "isa.h"
#include "pool.h"
#include "quantize_body.h"

namespace minisgl {
namespace {

constexpr int64_t kAlign = 64;
constexpr int64_t round_up(int64_t n) { return (n + kAlign - 1) / kAlign * kAlign; }
int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

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
  if (largest >= 0x7f800000u || amax < kSmallest) return empty_group(amax, codes);
  const float inverse = 127.0f / amax;
  int32_t sums[2] = {0, 0};
  for (int i = 0; i < kGroup; ++i) {
    const int32_t code = static_cast<int32_t>(std::nearbyintf(x[i] * inverse));
    codes[i] = static_cast<int8_t>(code);
    sums[i / 16] += code;
  }
  return {amax / 127.0f, sums[0], sums[1]};
}

struct Kernels {
  QuantizeFn quantize;
  RelateFn relate;
};

Kernels kernels() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return {quantize_avx512, relate_avx512};
    case Isa::kAvxVnni:
    case Isa::kAvx2:
      return {quantize_avx2, relate_avx2};
#endif
    default:
      return {quantize_portable, relate_portable};
  }
}

}  // namespace

void quantize_portable(const QuantizeTask& task) { quantize_groups(task, quantize_group); }
void relate_portable(const ActivationTile& x, int64_t groups) { relate_tile(x, groups); }

void Activations::Free::operator()(uint8_t* p) const { std::free(p); }

Activations::Activations(int64_t tokens, int64_t columns)
    : tokens_(tokens), columns_(columns), groups_((columns + kGroup - 1) / kGroup) {
  scale_offset_ = round_up(tokens_ * groups_ * kGroup);
  plane_ = round_up(tokens_ * groups_ * 4);
  unit_offset_ = scale_offset_ + (4 + kNumCodeSums) * plane_;
  const int64_t total = unit_offset_ + round_up(tokens_ * spans() * 4);
  memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(kAlign, total + round_up(kSpareTokens * kGroup))));
  if (!memory_) throw std::bad_alloc();
}

int64_t Activations::tile_tokens(int64_t tile) const {
  return min64(tokens_ - tile * kTileTokens, kTileTokens);
}

ActivationTile Activations::tile(int64_t tile) const {
  const int64_t first = tile * kTileTokens * groups_;
  const auto plane = [&](int64_t i) { return scale_offset_ + i * plane_ + first * 4; };
  ActivationTile result;
  result.codes = at<int8_t>(first * kGroup);
  result.scale = at<float>(plane(0));
  result.scaled_sum = at<float>(plane(1));
  for (int i = 0; i < kNumCodeSums; ++i) result.minus_sum[i] = at<int32_t>(plane(2 + i));
  result.start = at<int32_t>(plane(2 + kNumCodeSums));
  result.factor = at<int32_t>(plane(3 + kNumCodeSums));
  result.unit = at<float>(unit_offset_ + tile * kTileTokens * spans() * 4);
  result.stride = tile_tokens(tile);
  return result;
}

void Activations::quantize_part(const float* x, int64_t stride, int64_t begin, int64_t end,
                                int64_t first_group, int64_t end_group) {
  const QuantizeFn run = kernels().quantize;
  while (begin < end) {
    const int64_t index = begin / kTileTokens;
    const int64_t stop = min64(end, (index + 1) * kTileTokens);
    const ActivationTile out = tile(index).from(first_group, begin % kTileTokens);
    run({x, stride, stop - begin, end_group - first_group,
         columns_ - first_group * kGroup, out});
    x += (stop - begin) * stride;
    begin = stop;
  }
}

void Activations::quantize(const float* x, int64_t stride) {
  const int64_t blocks = (tokens_ + kTokenBlock - 1) / kTokenBlock;
  parallel_for(blocks, [&](int64_t block) {
    const int64_t begin = block * kTokenBlock;
    quantize_part(x + begin * stride, stride, begin, min64(begin + kTokenBlock, tokens_), 0,
                  groups_);
  });
  relate_scales();
}

void Activations::relate_scales() {
  const RelateFn run = kernels().relate;
  parallel_for(tiles(), [&](int64_t index) { run(tile(index), groups_); });
}

}  // namespace minisgl
