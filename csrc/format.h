// The packed weight formats: one block holds 16 rows by 32 columns.
//
// A row of blocks along the columns is a panel; panels follow each other. Inside a block come the
// codes, then the scales of the 16 rows, then their minimums if the format has them, both fp16 or,
// with 4 bits, integers of 16 bits that count in a float per row, the unit: 16 units follow the
// blocks of a panel. Codes are unsigned. Vector v (0..7) of a block is 64 bytes: for each of the 16 rows, its columns
// 4v..4v+3, so a 4-byte dot product instruction yields 16 rows at once, 8 or 4 rows in narrower
// registers.
//
//   4 bits     low nibbles of 64-byte line c (0..3) are vector c, high nibbles vector c + 4
//   5th bit    one more line: bit v of each byte belongs to vector v
//   bits 5, 6  two more lines: line h holds vectors 4h..4h+3, two bits each
//   8 bits     eight lines, one per vector
//
// value = scale * (code - offset)                          for q5, q6, q8
//       = scale * code + minimum                           for q5m
//       = unit * (scale * (code - offset))                 for q4
//       = unit * (scale * (code - offset) + 8 * minimum)   for q4m
// q6 has two scales per block and row, for columns 0..15 and 16..31. In q4m the scale and the
// minimum of a row lie side by side.
#pragma once

#include <cstdint>

namespace minisgl {

enum class Format : int { kQ4 = 0, kQ4m = 1, kQ5 = 2, kQ5m = 3, kQ6 = 4, kQ8 = 5 };
constexpr int kNumFormats = 6;

constexpr int kPanelRows = 16;
constexpr int kGroup = 32;  // columns that share a scale, in weights and activations
constexpr int kLine = 64;   // bytes of one vector of 16 rows by 4 columns
constexpr int kSpan = 8;    // groups whose sums are added as integers, for formats with a unit

// |scale| + |minimum| in units. A group of 4-bit codes less 8 and activations has sums of at most
// 8 * 127 * 32 in magnitude, times 8 groups: they fit into 32 bits.
constexpr int kMaxScale = 8190;
static_assert(int64_t{kSpan} * (8 * 127 * kGroup + 1) * kMaxScale < int64_t{1} << 31);

struct FormatInfo {
  const char* name;
  int bits;
  int offset;      // subtracted from the unsigned code
  int num_scales;  // per block and row
  bool has_min;
  bool has_unit;  // scales are integers

  constexpr int code_bytes() const { return kPanelRows * kGroup * bits / 8; }
  constexpr int block_bytes() const {
    return code_bytes() + kPanelRows * 2 * (num_scales + (has_min ? 1 : 0));
  }
};

constexpr FormatInfo kFormats[kNumFormats] = {
    {"q4", 4, 8, 1, false, true},   {"q4m", 4, 8, 1, true, true},
    {"q5", 5, 16, 1, false, false}, {"q5m", 5, 0, 1, true, false},
    {"q6", 6, 32, 2, false, false}, {"q8", 8, 128, 1, false, false},
};

constexpr FormatInfo info(Format format) { return kFormats[static_cast<int>(format)]; }

// A view of a packed weight: memory belongs to someone else.
struct PackedView {
  Format format;
  int64_t rows, columns;
  uint8_t* data;

  int64_t panels() const { return (rows + kPanelRows - 1) / kPanelRows; }
  int64_t groups() const { return (columns + kGroup - 1) / kGroup; }
  int64_t panel_bytes() const {
    const int64_t units = info(format).has_unit ? kPanelRows * 4 : 0;
    return groups() * info(format).block_bytes() + units;
  }
  int64_t bytes() const { return panels() * panel_bytes(); }
};

}  // namespace minisgl
