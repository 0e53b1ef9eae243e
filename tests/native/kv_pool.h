// A pool of keys and values of any kind, for tests: typed bytes and the floats they stand for.
#pragma once

#include "attention.h"
#include "test.h"

namespace minisgl_test {

inline int64_t element_size(KvKind kind) {
  return kind == KvKind::kFloat32 ? 4 : kind == KvKind::kInt8 ? 1 : 2;
}

class KvPool {
 public:
  int64_t token_stride;

  KvPool(KvKind kind, const AttentionShape& shape, int64_t locations, int64_t gap)
      : token_stride(shape.num_kv_heads * shape.head_dim + gap),
        kind_(kind),
        heads_(shape.num_kv_heads),
        dim_(shape.head_dim) {
    const int64_t last = shape.num_kv_heads * shape.head_dim;
    const size_t size = static_cast<size_t>((locations - 1) * token_stride + last);
    // A slot that was never written is a NaN, but for integers, where the scale is.
    for (auto& bytes : bytes_) bytes.assign(size * element_size(kind), 0xff);
    if (!has_scales(kind)) return;
    for (auto& scale : scale_) scale.assign(static_cast<size_t>(locations * heads_), kNan);
  }

  KvKind kind() const { return kind_; }
  KVView view() const {
    return {kind_, bytes_[0].data(), bytes_[1].data(), token_stride, scale_[0].data(),
            scale_[1].data()};
  }
  KVStore store() {
    return {kind_, bytes_[0].data(), bytes_[1].data(), token_stride, scale_[0].data(),
            scale_[1].data()};
  }

  // Column `column` of head `head` at a location; which: 0 is the key, 1 the value.
  float get(int which, int64_t location, int64_t head, int64_t column) const {
    const int64_t at = location * token_stride + head * dim_ + column;
    const float scale = has_scales(kind_) ? scale_[which][location * heads_ + head] : 1.0f;
    return element(which, at) * scale;
  }

  void set(int which, int64_t location, int64_t head, int64_t column, float value) {
    const int64_t at = location * token_stride + head * dim_ + column;
    uint8_t* to = bytes_[which].data() + at * element_size(kind_);
    const uint16_t narrow =
        kind_ == KvKind::kBfloat16 ? to_bfloat16(value) : float_to_half(value);
    if (kind_ == KvKind::kFloat32) std::memcpy(to, &value, 4);
    if (kind_ == KvKind::kBfloat16 || kind_ == KvKind::kFloat16) std::memcpy(to, &narrow, 2);
    if (!has_scales(kind_)) return;
    // A head that was given a value which is not finite keeps a NaN for its scale.
    float& scale = scale_[which][location * heads_ + head];
    if (column == 0) scale = kind_ == KvKind::kInt8 ? 0.01f : 0.001f;
    const float most = static_cast<float>(largest_code(kind_));
    const float code = std::fmax(std::fmin(value / scale, most), -most);
    if (!std::isfinite(value)) scale = kNan;
    const int16_t rounded = static_cast<int16_t>(std::isfinite(code) ? code : 0.0f);
    std::memcpy(to, &rounded, static_cast<size_t>(element_size(kind_)));  // the low byte first
  }

  // Everything in the pool, what lies between tokens too.
  Floats all() const {
    Floats result;
    for (int which = 0; which < 2; ++which) {
      const int64_t size = static_cast<int64_t>(bytes_[which].size()) / element_size(kind_);
      for (int64_t at = 0; at < size; ++at) {
        result.push_back(element(which, at));
      }
      result.insert(result.end(), scale_[which].begin(), scale_[which].end());
    }
    return result;
  }

 private:
  float element(int which, int64_t at) const {
    const uint8_t* from = bytes_[which].data() + at * element_size(kind_);
    float value;
    uint16_t narrow;
    if (kind_ == KvKind::kFloat32) {
      std::memcpy(&value, from, 4);
      return value;
    }
    if (kind_ == KvKind::kInt8) return static_cast<int8_t>(*from);
    std::memcpy(&narrow, from, 2);
    if (kind_ == KvKind::kInt16) return static_cast<int16_t>(narrow);
    return kind_ == KvKind::kBfloat16 ? from_bfloat16(narrow) : half_to_float(narrow);
  }

  KvKind kind_;
  int64_t heads_, dim_;
  std::vector<uint8_t> bytes_[2];
  Floats scale_[2];
};

}  // namespace minisgl_test
