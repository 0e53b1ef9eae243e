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

// Where a value is not finite the scale is NaN, which spoils the group, visibly.
bool all_finite(const float* x, int count) {
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += x[i] * 0.0f;
  return sum == 0;
}

// Codes are computed from the scale as stored, so that its own rounding does not add up with
// theirs. Groups whose values do not fit into fp16 become infinite, as a plain fp16 cast would.
void encode_q8(const float* x, int count, RowGroup* out) {
  float amax = 0;
  for (int i = 0; i < count; ++i) amax = std::fmax(amax, std::fabs(x[i]));
  const float scale = all_finite(x, count) ? half_to_float(float_to_half(amax / 127.0f)) : NAN;
  out->scale[0] = scale;
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  std::memset(out->code, 128, kGroup);
  for (int i = 0; i < count; ++i) out->code[i] = round_code(x[i] * inverse + 128.0f, 255);
}

typedef float Floats __attribute__((vector_size(16)));  // what every processor has
constexpr int kFloats = 4;

// A group and where it has values: 1 there, 0 in the padding of the last group of a row.
struct PaddedGroup {
  Floats x[kGroup / kFloats], there[kGroup / kFloats];

  PaddedGroup(const float* values, int count) {
    for (int i = 0; i < kGroup; ++i) {
      x[i / kFloats][i % kFloats] = values[i < count ? i : 0];
      there[i / kFloats][i % kFloats] = i < count ? 1.0f : 0.0f;
    }
  }
};

// Sum of squared errors for one choice of scale and minimum. Tried 16 times for each group, so it is
// written in vectors; a large number (1.5 * 2^23) rounds to even.
float error_q4(const PaddedGroup& group, float scale, float minimum) {
  constexpr float kMagic = 12582912.0f;
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  const Floats zero = {}, most = zero + 15.0f;
  Floats sums = {};
  for (int i = 0; i < kGroup / kFloats; ++i) {
    Floats code = (group.x[i] - minimum) * inverse;
    code = code > zero ? code : zero;
    code = code < most ? code : most;
    code = (code + kMagic) - kMagic;
    const Floats error = (code * scale + minimum - group.x[i]) * group.there[i];
    sums += error * error;
  }
  float total = 0;
  for (int i = 0; i < kFloats; ++i) total += sums[i];
  return total;
}

// Tries to narrow the range on both sides: clipping the extremes a little often costs less than
// the coarser steps that they would force on everything else.
void encode_q4m(const float* x, int count, RowGroup* out) {
  float low = INFINITY, high = -INFINITY;
  for (int i = 0; i < count; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  const float range = all_finite(x, count) ? high - low : NAN;
  const PaddedGroup group(x, count);
  constexpr float kClips[] = {0.0f, 0.025f, 0.05f, 0.08f};
  float best = INFINITY;
  out->scale[0] = range / 15.0f;
  out->minimum = low;
  for (const float below : kClips) {
    for (const float above : kClips) {
      const float scale = range * (1.0f - below - above) / 15.0f, minimum = low + range * below;
      const float error = error_q4(group, scale, minimum);
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
