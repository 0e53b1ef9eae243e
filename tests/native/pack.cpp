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

// Q8_0 and Q4_1, written out: a scale (and a minimum) in half precision, then the codes.
float decode(int type, const uint8_t* block, int column) {
  uint16_t half[2];
  std::memcpy(half, block, 4);
  if (type == 8) return half_to_float(half[0]) * static_cast<int8_t>(block[2 + column]);
  const int pair = block[4 + column % 16];
  const float code = static_cast<float>(column < 16 ? pair & 15 : pair >> 4);
  return half_to_float(half[0]) * code + half_to_float(half[1]);
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
  if (type.id != 8 && type.id != 3) return;
  Floats wanted;
  for (int64_t b = 0; b < rows * blocks; ++b) {
    for (int i = 0; i < kGroup; ++i) {
      wanted.push_back(decode(type.id, starts[b / blocks] + b % blocks * type.bytes, i));
    }
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    const bool zeros = wanted[i] == 0 && values[i] == 0;  // 0 has two signs
    if (zeros) wanted[i] = values[i];
  }
  family.expect_equal(wanted, values, what + " against the file");
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
