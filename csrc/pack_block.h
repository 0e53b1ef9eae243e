// One row of one packed block: writing it from one-byte codes and reading it back.
#pragma once

#include <cstdint>
#include <cstring>

#include "format.h"

namespace minisgl {
namespace {

struct RowGroup {
  uint8_t code[kGroup];
  uint16_t scale[2];  // fp16
  uint16_t minimum;   // fp16
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

inline void write_row_group(Format format, const RowGroup& group, int row, uint8_t* block) {
  const FormatInfo layout = info(format);
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
  uint8_t* scales = block + layout.code_bytes() + row * 2;
  for (int i = 0; i < layout.num_scales; ++i) {
    std::memcpy(scales + i * kPanelRows * 2, &group.scale[i], 2);
  }
  if (layout.has_min) {
    std::memcpy(scales + layout.num_scales * kPanelRows * 2, &group.minimum, 2);
  }
}

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
  const uint8_t* scales = block + layout.code_bytes() + row * 2;
  for (int i = 0; i < 2; ++i) {
    const int which = i < layout.num_scales ? i : 0;  // one scale serves both halves
    std::memcpy(&group->scale[i], scales + which * kPanelRows * 2, 2);
  }
  group->minimum = 0;
  if (layout.has_min) {
    std::memcpy(&group->minimum, scales + layout.num_scales * kPanelRows * 2, 2);
  }
}

}  // namespace
}  // namespace minisgl
