// Activations quantised to 8 bits: per token and group of 32 columns a float scale, integer codes
// in [-127, 127], and what the kernels need to correct for unsigned weight codes.
//
// Each group depends on its own 32 numbers only, so a token never depends on its neighbours. A
// group that holds a NaN or an infinity gets a NaN scale: it spoils its own token, visibly.
//
// Weights whose scales are integers want those of the activations as integers too: a span of groups
// has a float, its unit, and each group a factor in [0, 32767]. `relate_scales` makes them when all
// groups of a span are there.
//
// Tokens are stored in tiles of 80. Inside a tile, arrays are [group][token]: a kernel unpacks a
// weight block once and walks over the tokens of the tile in memory order.
#pragma once

#include <cstdint>
#include <memory>

#include "format.h"

namespace minisgl {

constexpr int kTileTokens = 80;
// A kernel may read this many tokens' worth behind the end of a tile, without using it.
constexpr int kSpareTokens = 5;
// Threads share out tokens by 16, the floats of a cache line: two threads that write into the same
// line wait for each other at every group.
constexpr int kTokenBlock = 16;

// Sums of codes: of a whole group, and of its halves for weights that have a scale per 16 columns.
// They are stored times what 8-bit and 6-bit weight codes are offset by.
enum CodeSum : int { kWholeSum = 0, kLowSum, kHighSum };
constexpr int kNumCodeSums = 3;
constexpr int kWholeOffsetBits = 7, kHalfOffsetBits = 5;
constexpr int offset_bits(int sum) { return sum == kWholeSum ? kWholeOffsetBits : kHalfOffsetBits; }

// Pointers to the start of one tile; `stride` is its number of tokens.
struct ActivationTile {
  int8_t* codes;                     // [group][token][32]
  float* scale;                      // [group][token]
  float* scaled_sum;                 // [group][token]: scale times the sum of the codes
  int32_t* minus_sum[kNumCodeSums];  // [group][token]: minus the sum of the codes, times an offset
  int32_t* start;                    // [group][token]: see `sum_start`
  int32_t* factor;                   // [group][token]: twice the factor, in both halves
  float* unit;                       // [span][token]
  int64_t stride;

  // What quantisation writes, from a group and token on.
  ActivationTile from(int64_t group, int64_t token) const {
    ActivationTile result = *this;
    const int64_t skip = group * stride + token;
    result.codes += skip * kGroup;
    result.scale += skip;
    result.scaled_sum += skip;
    for (int32_t*& sums : result.minus_sum) sums += skip;
    result.start += skip;
    return result;
  }
};

// Where the integer sum of a group of unsigned 4-bit codes and activations starts: the lower 16 bits
// end as the sum of (code - 8) * x, the upper ones as 8 * sum of x, less 1 if the lower are negative.
// One 16-bit dot product then multiplies both by the scale and the minimum.
constexpr int32_t sum_start(int32_t sum) { return 8 * sum * 65535; }

class Activations {
 public:
  // Throws std::bad_alloc. `columns` need not be a multiple of 32: the last group is padded by 0.
  Activations(int64_t tokens, int64_t columns);

  int64_t tokens() const { return tokens_; }
  int64_t columns() const { return columns_; }
  int64_t groups() const { return groups_; }
  int64_t tiles() const { return (tokens_ + kTileTokens - 1) / kTileTokens; }
  int64_t tile_tokens(int64_t tile) const;
  ActivationTile tile(int64_t tile) const;

  int64_t spans() const { return (groups_ + kSpan - 1) / kSpan; }

  // Quantises float rows `stride` elements apart; uses the thread pool.
  void quantize(const float* x, int64_t stride);

  // Quantises groups [first_group, end_group) of tokens [begin, end); `x` points to the first of
  // these groups of token `begin`. For callers that share out the work themselves; when all of it is
  // done, they call `relate_scales`.
  void quantize_part(const float* x, int64_t stride, int64_t begin, int64_t end,
                     int64_t first_group, int64_t end_group);

  // Fills in factors and units; uses the thread pool.
  void relate_scales();

 private:
  struct Free {
    void operator()(uint8_t* p) const;
  };
  template <class T>
  T* at(int64_t offset) const {
    return reinterpret_cast<T*>(memory_.get() + offset);
  }

  int64_t tokens_, columns_, groups_;
  int64_t scale_offset_, plane_, unit_offset_;
  std::unique_ptr<uint8_t, Free> memory_;
};

// Groups [0, groups) of tokens [0, tokens) of a tile whose pointers are those of the first one.
struct QuantizeTask {
  const float* x;
  int64_t x_stride;
  int64_t tokens, groups, columns;
  ActivationTile out;
};
using QuantizeFn = void (*)(const QuantizeTask& task);
void quantize_portable(const QuantizeTask& task);
void quantize_avx2(const QuantizeTask& task);
void quantize_avx512(const QuantizeTask& task);

// Factors and units of a tile.
using RelateFn = void (*)(const ActivationTile& x, int64_t groups);
void relate_portable(const ActivationTile& x, int64_t groups);
void relate_avx2(const ActivationTile& x, int64_t groups);
void relate_avx512(const ActivationTile& x, int64_t groups);

}  // namespace minisgl
