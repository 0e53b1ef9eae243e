// One row of packed blocks: writing it from one-byte codes and reading it back.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "format.h"
#include "half.h"

namespace minisgl {
namespace {

// scale * code + minimum, or scale * (code - offset).
struct RowGroup {
  uint8_t code[kGroup];
  float scale[2];
  float minimum;
};

// Words are four columns of one row: word v of a row lies at byte 4 * row of vector v.
inline void write_word(uint8_t* block, int line, int row, uint32_t word) {
  std::memcpy(block + line * kLine + row * 4, &word, 4);
}

inline uint32_t read_word(const uint8_t* block, int line, int row) {
  uint32_t word;
  std::memcpy(&word, block + line * kLine + row * 4, 4);
  return word;
}

inline void write_int16(uint8_t* to, float value) {
  const auto whole = static_cast<int16_t>(std::nearbyintf(value));
  std::memcpy(to, &whole, 2);
}

inline void write_half(uint8_t* to, float value) {
  const uint16_t half = float_to_half(value);
  std::memcpy(to, &half, 2);
}

inline float read_int16(const uint8_t* from) {
  int16_t whole;
  std::memcpy(&whole, from, 2);
  return static_cast<float>(whole);
}

inline float read_half(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, 2);
  return half_to_float(half);
}

// What is left of a minimum when codes are counted from 8.
inline float centre(const RowGroup& group) { return group.minimum + 8 * group.scale[0]; }

inline void write_codes(const FormatInfo& layout, const RowGroup& group, int row, uint8_t* block) {
  uint32_t w[8];
  std::memcpy(w, group.code, sizeof(w));
  if (layout.bits == 8) {
    for (int v = 0; v < 8; ++v) write_word(block, v, row, w[v]);
  } else {
    for (int v = 0; v < 4; ++v) {
      write_word(block, v, row, (w[v] & 0x0f0f0f0fu) | (w[v + 4] & 0x0f0f0f0fu) << 4);
    }
  }
  if (layout.bits == 5) {
    uint32_t high = 0;
    for (int v = 0; v < 8; ++v) high |= (w[v] >> 4 & 0x01010101u) << v;
    write_word(block, 4, row, high);
  }
  if (layout.bits == 6) {
    for (int line = 0; line < 2; ++line) {
      uint32_t high = 0;
      for (int v = 0; v < 4; ++v) high |= (w[4 * line + v] >> 4 & 0x03030303u) << 2 * v;
      write_word(block, 4 + line, row, high);
    }
  }
}

// The unit of a row, so that scales and minimums are at most kMaxScale after rounding. 0 for a row
// of zeros; NaN, which spoils it, for one that is not finite.
inline float choose_unit(const FormatInfo& layout, const RowGroup* groups, int64_t count) {
  constexpr float kSmallest = 1e-30f;  // a unit below would not be a normal number
  float most = 0;
  bool finite = true;
  for (int64_t g = 0; g < count; ++g) {
    float size = std::fabs(groups[g].scale[0]);
    if (layout.has_min) size += std::fabs(centre(groups[g])) / 8;
    finite &= size <= FLT_MAX;
    most = std::fmax(most, size);
  }
  if (!finite) return NAN;
  return most < kSmallest ? 0 : most / (kMaxScale - 1);
}

// Writes one row of a panel, group by group.
inline void write_row(Format format, const RowGroup* groups, int64_t count, int row,
                      uint8_t* panel) {
  const FormatInfo layout = info(format);
  const float unit = layout.has_unit ? choose_unit(layout, groups, count) : 1;
  const float inverse = unit > 0 ? 1 / unit : 0;
  uint8_t* block = panel;
  for (int64_t g = 0; g < count; ++g, block += layout.block_bytes()) {
    const RowGroup& group = groups[g];
    write_codes(layout, group, row, block);
    uint8_t* scales = block + layout.code_bytes();
    if (layout.has_unit) {
      scales += row * (layout.has_min ? 4 : 2);
      write_int16(scales, unit > 0 ? group.scale[0] * inverse : 0);
      if (layout.has_min) write_int16(scales + 2, unit > 0 ? centre(group) / 8 * inverse : 0);
      continue;
    }
    scales += row * 2;
    for (int i = 0; i < layout.num_scales; ++i) {
      write_half(scales + i * kPanelRows * 2, group.scale[i]);
    }
    if (layout.has_min) write_half(scales + layout.num_scales * kPanelRows * 2, group.minimum);
  }
  if (layout.has_unit) std::memcpy(block + row * 4, &unit, 4);
}

// Scales and minimums as they are stored: those of a format with a unit are to be multiplied by it.
inline void read_row_group(Format format, const uint8_t* block, int row, RowGroup* group) {
  const FormatInfo layout = info(format);
  uint32_t w[8];
  if (layout.bits == 8) {
    for (int v = 0; v < 8; ++v) w[v] = read_word(block, v, row);
  } else {
    for (int v = 0; v < 4; ++v) {
      const uint32_t word = read_word(block, v, row);
      w[v] = word & 0x0f0f0f0fu;
      w[v + 4] = word >> 4 & 0x0f0f0f0fu;
    }
  }
  if (layout.bits == 5) {
    const uint32_t high = read_word(block, 4, row);
    for (int v = 0; v < 8; ++v) w[v] |= (high >> v & 0x01010101u) << 4;
  }
  if (layout.bits == 6) {
    for (int v = 0; v < 8; ++v) {
      w[v] |= (read_word(block, 4 + v / 4, row) >> 2 * (v % 4) & 0x03030303u) << 4;
    }
  }
  std::memcpy(group->code, w, sizeof(w));
  const uint8_t* scales = block + layout.code_bytes();
  group->minimum = 0;
  if (layout.has_unit) {
    scales += row * (layout.has_min ? 4 : 2);
    group->scale[0] = group->scale[1] = read_int16(scales);
    if (layout.has_min) group->minimum = 8 * read_int16(scales + 2);
    return;
  }
  scales += row * 2;
  for (int i = 0; i < 2; ++i) {
    const int which = i < layout.num_scales ? i : 0;  // one scale serves both halves
    group->scale[i] = read_half(scales + which * kPanelRows * 2);
  }
  if (layout.has_min) group->minimum = read_half(scales + layout.num_scales * kPanelRows * 2);
}

}  // namespace
}  // namespace minisgl
