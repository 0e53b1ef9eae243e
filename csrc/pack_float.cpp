// From floats to packed blocks (round to nearest within each group), and back.
#include <cmath>
#include <stdexcept>
#include <vector>

#include "pack.h"
#include "pack_block.h"
#include "pool.h"

namespace minisgl {
namespace {

float read_float(FloatKind kind, const void* source, int64_t at) {
  if (kind == FloatKind::kFloat32) return static_cast<const float*>(source)[at];
  const uint16_t raw = static_cast<const uint16_t*>(source)[at];
  if (kind == FloatKind::kFloat16) return half_to_float(raw);
  const uint32_t bits = static_cast<uint32_t>(raw) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint8_t round_code(float value, int highest) {
  const float code = std::nearbyintf(value);
  if (!(code > 0)) return 0;
  if (code >= static_cast<float>(highest)) return static_cast<uint8_t>(highest);
  return static_cast<uint8_t>(code);
}

// Codes are computed from the scale as stored, so that its own rounding does not add up with
// theirs. Groups whose values do not fit into fp16 become infinite, as a plain fp16 cast would.
void encode_q8(const float* x, int count, RowGroup* out) {
  float amax = 0;
  for (int i = 0; i < count; ++i) amax = std::fmax(amax, std::fabs(x[i]));
  const float scale = half_to_float(float_to_half(amax / 127.0f));
  out->scale[0] = scale;
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  std::memset(out->code, 128, kGroup);
  for (int i = 0; i < count; ++i) out->code[i] = round_code(x[i] * inverse + 128.0f, 255);
}

// Sum of squared errors for one choice of scale and minimum.
float error_q4(const float* x, int count, float scale, float minimum) {
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  float total = 0;
  for (int i = 0; i < count; ++i) {
    const float code = static_cast<float>(round_code((x[i] - minimum) * inverse, 15));
    const float error = code * scale + minimum - x[i];
    total += error * error;
  }
  return total;
}

// Tries to narrow the range on both sides: clipping the extremes a little often costs less than
// the coarser steps that they would force on everything else.
void encode_q4m(const float* x, int count, RowGroup* out) {
  float low = x[0], high = x[0];
  for (int i = 1; i < count; ++i) {
    low = std::fmin(low, x[i]);
    high = std::fmax(high, x[i]);
  }
  const float range = high - low;
  constexpr float kClips[] = {0.0f, 0.025f, 0.05f, 0.08f};
  float best = INFINITY;
  out->scale[0] = range / 15.0f;
  out->minimum = low;
  for (const float below : kClips) {
    for (const float above : kClips) {
      const float scale = range * (1.0f - below - above) / 15.0f, minimum = low + range * below;
      const float error = error_q4(x, count, scale, minimum);
      if (error < best) {
        best = error;
        out->scale[0] = scale;
        out->minimum = minimum;
      }
    }
  }
  const float inverse = out->scale[0] > 0 ? 1.0f / out->scale[0] : 0.0f;
  std::memset(out->code, 0, kGroup);
  for (int i = 0; i < count; ++i) out->code[i] = round_code((x[i] - out->minimum) * inverse, 15);
}

}  // namespace

void pack_float(FloatKind kind, const void* source, int64_t stride, const PackedView& out) {
  if (out.format != Format::kQ4m && out.format != Format::kQ8) {
    throw std::invalid_argument("floats can be packed to q4m or q8 only");
  }
  parallel_for(out.panels(), [&](int64_t panel) {
    uint8_t* to = out.data + panel * out.panel_bytes();
    for (int r = 0; r < kPanelRows; ++r) {
      const int64_t row = panel * kPanelRows + r;
      std::vector<RowGroup> groups(static_cast<size_t>(out.groups()));
      for (int64_t g = 0; g < out.groups() && row < out.rows; ++g) {
        const int64_t left = out.columns - g * kGroup, at = row * stride + g * kGroup;
        const int count = left < kGroup ? static_cast<int>(left) : kGroup;
        float x[kGroup];
        for (int i = 0; i < count; ++i) x[i] = read_float(kind, source, at + i);
        const auto encode = out.format == Format::kQ8 ? encode_q8 : encode_q4m;
        encode(x, count, &groups[static_cast<size_t>(g)]);
      }
      write_row(out.format, groups.data(), out.groups(), r, to);
    }
  });
}

void unpack_row(const PackedView& weight, int64_t row, float* out) {
  const FormatInfo layout = info(weight.format);
  const int in_panel = static_cast<int>(row % kPanelRows);
  const uint8_t* panel = weight.data + row / kPanelRows * weight.panel_bytes();
  float unit = 1;
  if (layout.has_unit) {
    std::memcpy(&unit, panel + weight.groups() * layout.block_bytes() + in_panel * 4, 4);
  }
  for (int64_t g = 0; g < weight.groups(); ++g) {
    RowGroup group;
    read_row_group(weight.format, panel + g * layout.block_bytes(), in_panel, &group);
    const int64_t left = weight.columns - g * kGroup;
    const int count = left < kGroup ? static_cast<int>(left) : kGroup;
    for (int i = 0; i < count; ++i) {
      const float code = static_cast<float>(group.code[i] - layout.offset);
      out[g * kGroup + i] = unit * (group.scale[i / 16] * code + group.minimum);
    }
  }
}

}  // namespace minisgl
