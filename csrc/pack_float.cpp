// From floats to packed blocks (round to nearest within each group), and back.
#include <cmath>
#include <stdexcept>

#include "half.h"
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
  out->scale[0] = float_to_half(amax / 127.0f);
  const float scale = half_to_float(out->scale[0]);
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  std::memset(out->code, 128, kGroup);
  for (int i = 0; i < count; ++i) out->code[i] = round_code(x[i] * inverse + 128.0f, 255);
}

// Sum of squared errors for one choice of scale and minimum (both as stored).
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
  constexpr float kClips[] = {0.0f, 0.025f, 0.05f, 0.08f};
  float best = INFINITY;
  out->scale[0] = float_to_half((high - low) / 15.0f);
  out->minimum = float_to_half(low);
  for (const float below : kClips) {
    for (const float above : kClips) {
      const float range = high - low;
      const uint16_t scale = float_to_half(range * (1.0f - below - above) / 15.0f);
      const uint16_t minimum = float_to_half(low + range * below);
      const float error = error_q4(x, count, half_to_float(scale), half_to_float(minimum));
      if (error < best) {
        best = error;
        out->scale[0] = scale;
        out->minimum = minimum;
      }
    }
  }
  const float scale = half_to_float(out->scale[0]), minimum = half_to_float(out->minimum);
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  std::memset(out->code, 0, kGroup);
  for (int i = 0; i < count; ++i) out->code[i] = round_code((x[i] - minimum) * inverse, 15);
}

}  // namespace

void pack_float(FloatKind kind, const void* source, int64_t stride, const PackedView& out) {
  if (out.format != Format::kQ4m && out.format != Format::kQ8) {
    throw std::invalid_argument("floats can be packed to q4m or q8 only");
  }
  parallel_for(out.panels(), [&](int64_t panel) {
    uint8_t* to = out.data + panel * out.panel_bytes();
    for (int64_t g = 0; g < out.groups(); ++g, to += info(out.format).block_bytes()) {
      const int64_t left = out.columns - g * kGroup;
      const int count = left < kGroup ? static_cast<int>(left) : kGroup;
      for (int r = 0; r < kPanelRows; ++r) {
        const int64_t row = panel * kPanelRows + r;
        RowGroup group = {};
        if (row < out.rows) {
          float x[kGroup];
          const int64_t at = row * stride + g * kGroup;
          for (int i = 0; i < count; ++i) x[i] = read_float(kind, source, at + i);
          if (out.format == Format::kQ8) {
            encode_q8(x, count, &group);
          } else {
            encode_q4m(x, count, &group);
          }
        }
        write_row_group(out.format, group, r, to);
      }
    }
  });
}

void unpack_row(const PackedView& weight, int64_t row, float* out) {
  const FormatInfo layout = info(weight.format);
  const uint8_t* block = weight.data + row / kPanelRows * weight.panel_bytes();
  for (int64_t g = 0; g < weight.groups(); ++g, block += layout.block_bytes()) {
    RowGroup group;
    read_row_group(weight.format, block, static_cast<int>(row % kPanelRows), &group);
    const float scale[2] = {half_to_float(group.scale[0]), half_to_float(group.scale[1])};
    const float minimum = half_to_float(group.minimum);
    const int64_t left = weight.columns - g * kGroup;
    const int count = left < kGroup ? static_cast<int>(left) : kGroup;
    for (int i = 0; i < count; ++i) {
      const float code = static_cast<float>(group.code[i] - layout.offset);
      out[g * kGroup + i] = scale[i / 16] * code + minimum;
    }
  }
}

}  // namespace minisgl
