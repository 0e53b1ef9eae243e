// Activations quantised to 8 bits: per token and group of 32 columns a float scale, integer codes
// in [-127, 127], and what the kernels need to correct for unsigned weight codes.
//
// Each group depends on its own 32 numbers only, so a token never depends on its neighbours. A
// group that holds a NaN or an infinity gets a NaN scale: it spoils its own token, visibly.
//
// Tokens are stored in tiles of 32. Inside a tile, arrays are [group][token]: a kernel unpacks a
// weight block once and walks over the tokens of the tile in memory order.
#pragma once

#include <cstdint>
#include <memory>

namespace minisgl {

constexpr int kTileTokens = 32;

// Corrections, each the initial value of an integer sum: minus the sum of the codes, times the
// offset of the weight codes.
enum Correction : int { kTimes8 = 0, kTimes16, kTimes128, kTimes32Low, kTimes32High };
constexpr int kNumCorrections = 5;

// Pointers to the start of one tile; `stride` is its number of tokens.
struct ActivationTile {
  const int8_t* codes;          // [group][token][32]
  const float* scale;           // [group][token]
  const float* scaled_sum;      // [group][token]: scale times the sum of the codes
  const int32_t* correction[kNumCorrections];
  int64_t stride;
};

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

  // Quantises float rows `stride` elements apart; uses the thread pool.
  void quantize(const float* x, int64_t stride);

  // Quantises one token's row: for callers that have just computed it and share out tokens
  // themselves.
  void quantize_token(int64_t token, const float* row);

 private:
  struct Free {
    void operator()(uint8_t* p) const;
  };
  template <class T>
  T* at(int64_t offset) const {
    return reinterpret_cast<T*>(memory_.get() + offset);
  }

  int64_t tokens_, columns_, groups_;
  int64_t scale_offset_, sum_offset_, correction_offset_;
  std::unique_ptr<uint8_t, Free> memory_;
};

// Quantises one group of 32: writes the codes, returns the scale and the two half sums.
struct GroupResult {
  float scale;
  int32_t low_sum, high_sum;
};
using QuantizeGroupFn = GroupResult (*)(const float* x, int8_t* codes);
QuantizeGroupFn quantize_group_portable();
QuantizeGroupFn quantize_group_avx2();

}  // namespace minisgl
