// Packed weights for tests, written as format.h describes them.
#pragma once

#include "activations.h"
#include "format.h"
#include "test.h"

namespace minisgl_test {

// Owns exactly the bytes of its view.
struct PackedWeight {
  std::vector<uint8_t> bytes;
  PackedView view;

  PackedWeight(Format format, int64_t rows, int64_t columns)
      : view{format, rows, columns, nullptr} {
    bytes.resize(static_cast<size_t>(view.bytes()));
    view.data = bytes.data();
  }
  PackedWeight(PackedWeight&&) = default;  // the bytes stay where they are

  uint8_t* block(int64_t panel, int64_t group) {
    return view.data + panel * view.panel_bytes() + group * info(view.format).block_bytes();
  }
};

// A 16-bit scale and minimum as a format with a unit allows them; minimum 0 if it has none.
inline void write_whole_scale(Random& random, const FormatInfo& layout, int row, uint8_t* scales) {
  const int64_t size = random.one_in(3) ? kMaxScale : random.between(0, kMaxScale);
  const int64_t minimum = layout.has_min ? random.between(0, size) : 0;
  const int64_t values[2] = {random.one_in(2) ? size - minimum : minimum - size,
                             random.one_in(2) ? minimum : -minimum};
  for (int i = 0; i < (layout.has_min ? 2 : 1); ++i) {
    const auto value = static_cast<int16_t>(values[i]);
    std::memcpy(scales + (layout.has_min ? 4 * row : 2 * row) + 2 * i, &value, 2);
  }
}

// Random codes and scales; `extreme`: the largest and smallest codes only; `odd`: a few scales (of
// rows, where scales are integers) that are no finite normal numbers.
inline PackedWeight random_weight(Random& random, Format format, int64_t rows, int64_t columns,
                                  bool odd = false, bool extreme = false) {
  PackedWeight weight(format, rows, columns);
  const FormatInfo layout = info(format);
  for (uint8_t& byte : weight.bytes) {
    byte = static_cast<uint8_t>(extreme ? -random.between(0, 1) : random.between(0, 255));
  }
  const auto scale = [&] {
    return odd && random.one_in(97) ? random.strange() : random.normal() * 0.01f;
  };
  for (int64_t panel = 0; panel < weight.view.panels(); ++panel) {
    for (int64_t group = 0; group < weight.view.groups(); ++group) {
      uint8_t* block = weight.block(panel, group);
      for (int row = 0; row < kPanelRows && layout.has_unit; ++row) {
        write_whole_scale(random, layout, row, block + layout.code_bytes());
      }
      for (int at = layout.code_bytes(); at < layout.block_bytes() && !layout.has_unit; at += 2) {
        const uint16_t half = float_to_half(scale());
        std::memcpy(block + at, &half, 2);
      }
    }
    for (int row = 0; row < kPanelRows && layout.has_unit; ++row) {
      const float unit = scale() / 1000;
      std::memcpy(weight.block(panel, weight.view.groups()) + row * 4, &unit, 4);
    }
  }
  return weight;
}

// The identity matrix: what a product with it gives is what quantisation made of the activations.
inline PackedWeight identity(int64_t columns) {
  PackedWeight weight(Format::kQ8, columns, columns);
  const uint16_t one = 0x3c00;
  for (int64_t b = 0; b < weight.view.panels() * weight.view.groups(); ++b) {
    uint8_t* block = weight.view.data + b * info(Format::kQ8).block_bytes();
    std::memset(block, 128, static_cast<size_t>(info(Format::kQ8).code_bytes()));
    for (int row = 0; row < kPanelRows; ++row) {
      std::memcpy(block + info(Format::kQ8).code_bytes() + 2 * row, &one, 2);
    }
  }
  for (int64_t i = 0; i < columns; ++i) {
    const int64_t column = i % kGroup, row = i % kPanelRows;
    weight.block(i / kPanelRows, i / kGroup)[column / 4 * kLine + row * 4 + column % 4] = 129;
  }
  return weight;
}

// All that quantisation wrote.
inline Floats contents(const Activations& x) {
  Floats all;
  for (int64_t i = 0; i < x.tiles(); ++i) {
    const ActivationTile tile = x.tile(i);
    const int64_t count = tile.stride * x.groups();
    all.insert(all.end(), tile.codes, tile.codes + count * kGroup);
    all.insert(all.end(), tile.scale, tile.scale + count);
    all.insert(all.end(), tile.scaled_sum, tile.scaled_sum + count);
    for (const int32_t* sums : tile.minus_sum) all.insert(all.end(), sums, sums + count);
    all.insert(all.end(), tile.start, tile.start + count);
    all.insert(all.end(), tile.factor, tile.factor + count);
    all.insert(all.end(), tile.unit, tile.unit + tile.stride * x.spans());
  }
  return all;
}

}  // namespace minisgl_test
