// Packing from GGUF blocks and from floats, and unpacking.
#include "pack.h"

#include <algorithm>

#include "test.h"
#include "weights.h"

namespace minisgl_test {
namespace {

Floats unpacked(const PackedView& view) {
  Floats all(static_cast<size_t>(view.rows * view.columns));
  for (int64_t row = 0; row < view.rows; ++row) {
    unpack_row(view, row, all.data() + row * view.columns);
  }
  return all;
}

// What a column of a block stands for, as the file format defines it: scale * code + minimum.
struct Decoded {
  float scale, minimum;
  int code;
};

Decoded decode(int type, const uint8_t* b, int c) {
  const auto half = [b](int at) {
    uint16_t bits;
    std::memcpy(&bits, b + at, 2);
    return half_to_float(bits);
  };
  const int group = c / 32, low = c % 16, shift = c < 16 ? 0 : 4;  // of nibbles, in small blocks
  const auto fifth = [b, c](int at) { return (b[at + c / 8] >> c % 8 & 1) << 4; };
  switch (type) {
    case 2:  // Q4_0
      return {half(0), 0, (b[2 + low] >> shift & 15) - 8};
    case 3:  // Q4_1
      return {half(0), half(2), b[4 + low] >> shift & 15};
    case 6:  // Q5_0
      return {half(0), 0, (b[6 + low] >> shift & 15) + fifth(2) - 16};
    case 7:  // Q5_1
      return {half(0), half(2), (b[8 + low] >> shift & 15) + fifth(4)};
    case 8:  // Q8_0
      return {half(0), 0, static_cast<int8_t>(b[2 + c])};
    case 14: {  // Q6_K: columns of a half in four runs of 32
      const int run = c % 128 / 32, line = c / 128;
      const int nibble = b[line * 64 + run % 2 * 32 + c % 32] >> run / 2 * 4 & 15;
      const int pair = b[128 + line * 32 + c % 32] >> run * 2 & 3;
      return {half(208) * static_cast<int8_t>(b[192 + c / 16]), 0, nibble + pair * 16 - 32};
    }
    default: {  // Q4_K and Q5_K: scales and minimums of 6 bits, the last four of them in two pieces
      const uint8_t* s = b + 4;
      const bool first = group < 4;
      const int scale = first ? s[group] % 64 : s[group + 4] % 16 + s[group - 4] / 64 * 16;
      const int minimum = first ? s[group + 4] % 64 : s[group + 4] / 16 + s[group] / 64 * 16;
      const int at = (type == 12 ? 16 : 48) + group / 2 * 32 + c % 32;
      const int high = type == 12 ? 0 : b[16 + c % 32] >> group & 1;
      return {half(0) * static_cast<float>(scale), -half(2) * static_cast<float>(minimum),
              (b[at] >> group % 2 * 4 & 15) + high * 16};
    }
  }
}

// As far as scales allow that were rounded to half precision, or to integers in units of `most`.
void check_gguf(Family& family, const std::string& what, const Decoded& wanted, float value,
                float most) {
  const float largest = std::fmax(std::fabs(wanted.scale), std::fabs(wanted.minimum));
  const bool finite = std::isfinite(most + wanted.scale + wanted.minimum);
  if (!finite || largest > 65000) return;
  const float product = wanted.scale * static_cast<float>(wanted.code);
  const float bound = most > 0 ? most * 8.02f / kMaxScale
                               : (std::fabs(product) + std::fabs(wanted.minimum)) / 1024 + 0x1p-18f;
  family.check(std::fabs(value - (product + wanted.minimum)) <= bound + 1e-30f,
               what + " against the file");
}

// Of the rows of a format with a unit, what the largest integer stands for; 0 for other formats.
Floats largest_scales(const GgufType& type, const uint8_t* const* starts, int64_t rows,
                      int64_t columns) {
  Floats most(static_cast<size_t>(rows), 0.0f);
  for (int64_t i = 0; i < rows * columns && info(type.format).has_unit; ++i) {
    const int64_t column = i % columns;
    const uint8_t* block = starts[i / columns] + column / type.columns * type.bytes;
    const Decoded d = decode(type.id, block, static_cast<int>(column % type.columns));
    const bool centred = type.format == Format::kQ4;  // its codes have been counted from 8
    const float minimum = centred ? 0 : d.minimum + 8 * d.scale;
    const float size = std::fabs(d.scale) + std::fabs(minimum) / 8;
    float& row = most[i / columns];
    row = std::isfinite(size) ? std::fmax(row, size) : INFINITY;
    if (!(row < INFINITY)) i += columns - 1 - column;  // the row is spoilt
  }
  return most;
}

void test_gguf(Family& family, Random& random, const GgufType& type) {
  const int64_t rows = random.between(1, 40), blocks = random.between(1, 5);
  const int64_t columns = blocks * type.columns;
  std::vector<uint8_t> source(static_cast<size_t>(rows * blocks * type.bytes));
  for (uint8_t& byte : source) byte = static_cast<uint8_t>(random.between(0, 255));
  std::vector<const uint8_t*> starts;  // of the rows; the last one lies first
  for (int64_t r = rows - 1; r >= 0; --r) starts.push_back(source.data() + r * blocks * type.bytes);
  const std::string what = text("gguf type ", type.id, ", ", rows, " x ", columns);
  const Floats values = same_everywhere(family, what, [&] {
    PackedWeight weight(type.format, rows, columns);
    pack_gguf(type, starts.data(), weight.view);
    return unpacked(weight.view);
  });
  const Floats most = largest_scales(type, starts.data(), rows, columns);
  for (int64_t i = 0; i < rows * columns; ++i) {
    const int64_t column = i % columns;
    const uint8_t* block = starts[i / columns] + column / type.columns * type.bytes;
    const int at = static_cast<int>(column % type.columns);
    check_gguf(family, what, decode(type.id, block, at), values[i], most[i / columns]);
    if (!std::isfinite(most[i / columns])) family.check(values[i] != values[i], what + " spoilt");
  }
}

void test_floats(Family& family, Random& random, FloatKind kind, Format format) {
  const int64_t rows = random.between(1, 40), columns = random.between(1, 150);
  const int64_t stride = columns + random.between(0, 3);
  const bool odd = random.one_in(3);
  Floats source = random.normals((rows - 1) * stride + columns);
  std::vector<uint16_t> narrow;
  for (float& value : source) {
    if (odd && random.one_in(97)) value = random.strange();
    if (kind == FloatKind::kBfloat16) narrow.push_back(to_bfloat16(value));
    if (kind == FloatKind::kFloat16) narrow.push_back(float_to_half(value));
    if (kind == FloatKind::kBfloat16) value = from_bfloat16(narrow.back());
    if (kind == FloatKind::kFloat16) value = half_to_float(narrow.back());
  }
  const void* data = narrow.empty() ? static_cast<const void*>(source.data()) : narrow.data();
  const std::string what = text("floats to ", info(format).name, ", ", rows, " x ", columns);
  const Floats values = same_everywhere(family, what, [&] {
    PackedWeight weight(format, rows, columns);
    pack_float(kind, data, stride, weight.view);
    return unpacked(weight.view);
  });
  for (int64_t row = 0; row < rows && !odd; ++row) {
    for (int64_t k = 0; k < columns; ++k) {
      // No value is over 3.5: half a step of 8 bits, a step of 4 bits and what is clipped.
      const float error = std::fabs(values[row * columns + k] - source[row * stride + k]);
      family.check(error <= (format == Format::kQ8 ? 0.02f : 0.6f), what + ": too far off");
    }
  }
}

}  // namespace

void test_pack(Family& family) {
  Random random(3);
  for (int round = 0; round < 20; ++round) {
    for (int id = 0; id < 40; ++id) {
      const GgufType* type = gguf_type(id);
      if (type != nullptr) test_gguf(family, random, *type);
    }
    for (int i = 0; i < kNumFloatKinds; ++i) {
      test_floats(family, random, static_cast<FloatKind>(i), Format::kQ4m);
      test_floats(family, random, static_cast<FloatKind>(i), Format::kQ8);
    }
  }
}

}  // namespace minisgl_test
