// From GGUF blocks to packed blocks. Each source type is decoded group by group into 32 one-byte
// codes and its scale; then one routine writes the row into place.
#include <cstring>
#include <vector>

#include "pack.h"
#include "pack_block.h"
#include "pool.h"

namespace minisgl {
namespace {

// 32 nibbles: 16 low ones, then 16 high ones.
void split_nibbles(const uint8_t* nibbles, uint8_t* code) {
  for (int i = 0; i < 16; ++i) {
    code[i] = nibbles[i] & 15;
    code[i + 16] = nibbles[i] >> 4;
  }
}

void add_high_bits(const uint8_t* bits, uint8_t* code) {
  for (int i = 0; i < 32; ++i) code[i] |= static_cast<uint8_t>((bits[i / 8] >> i % 8 & 1) << 4);
}

void decode_q4_0(const uint8_t* p, RowGroup* out) {
  out->scale[0] = read_half(p);
  split_nibbles(p + 2, out->code);
}

void decode_q4_1(const uint8_t* p, RowGroup* out) {
  out->scale[0] = read_half(p);
  out->minimum = read_half(p + 2);
  split_nibbles(p + 4, out->code);
}

void decode_q5_0(const uint8_t* p, RowGroup* out) {
  out->scale[0] = read_half(p);
  split_nibbles(p + 6, out->code);
  add_high_bits(p + 2, out->code);
}

void decode_q5_1(const uint8_t* p, RowGroup* out) {
  out->scale[0] = read_half(p);
  out->minimum = read_half(p + 2);
  split_nibbles(p + 8, out->code);
  add_high_bits(p + 4, out->code);
}

void decode_q8_0(const uint8_t* p, RowGroup* out) {
  out->scale[0] = read_half(p);
  for (int i = 0; i < 32; ++i) out->code[i] = p[2 + i] ^ 0x80;
}

// Q4_K and Q5_K start alike: d, dmin, and eight 6-bit pairs of scale and minimum in 12 bytes.
void decode_k_scales(const uint8_t* p, RowGroup* out) {
  const float d = read_half(p), dmin = read_half(p + 2);
  const uint8_t* s = p + 4;
  for (int g = 0; g < 8; ++g) {
    const int scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
    const int minimum = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
    out[g].scale[0] = d * static_cast<float>(scale);
    out[g].minimum = -dmin * static_cast<float>(minimum);
  }
}

// Each 32 bytes hold two groups: low nibbles, then high nibbles.
void decode_q4_k(const uint8_t* p, RowGroup* out) {
  decode_k_scales(p, out);
  const uint8_t* nibbles = p + 16;
  for (int g = 0; g < 8; g += 2, nibbles += 32) {
    for (int i = 0; i < 32; ++i) {
      out[g].code[i] = nibbles[i] & 15;
      out[g + 1].code[i] = nibbles[i] >> 4;
    }
  }
}

void decode_q5_k(const uint8_t* p, RowGroup* out) {
  decode_k_scales(p, out);
  const uint8_t *high = p + 16, *nibbles = p + 48;
  for (int g = 0; g < 8; g += 2, nibbles += 32) {
    for (int i = 0; i < 32; ++i) {
      const int bits = high[i] >> g;
      out[g].code[i] = static_cast<uint8_t>((nibbles[i] & 15) | (bits & 1) << 4);
      out[g + 1].code[i] = static_cast<uint8_t>(nibbles[i] >> 4 | (bits >> 1 & 1) << 4);
    }
  }
}

// Two halves of 128 columns: 64 bytes of nibbles and 32 bytes of bit pairs each, then 16 signed
// scales of 16 columns and d.
void decode_q6_k(const uint8_t* p, RowGroup* out) {
  for (int half = 0; half < 2; ++half) {
    const uint8_t *low = p + half * 64, *high = p + 128 + half * 32;
    RowGroup* group = out + half * 4;
    for (int i = 0; i < 32; ++i) {
      const int a = low[i], b = low[i + 32], h = high[i];
      group[0].code[i] = static_cast<uint8_t>((a & 15) | (h & 3) << 4);
      group[1].code[i] = static_cast<uint8_t>((b & 15) | (h >> 2 & 3) << 4);
      group[2].code[i] = static_cast<uint8_t>(a >> 4 | (h >> 4 & 3) << 4);
      group[3].code[i] = static_cast<uint8_t>(b >> 4 | (h >> 6) << 4);
    }
  }
  const float d = read_half(p + 208);
  for (int i = 0; i < 16; ++i) {
    const float scale = static_cast<float>(static_cast<int8_t>(p[192 + i]));
    out[i / 2].scale[i % 2] = d * scale;
  }
}

using DecodeFn = void (*)(const uint8_t* source, RowGroup* out);

struct Source {
  GgufType type;
  DecodeFn decode;
};

const Source kSources[] = {
    {{2, 32, 18, Format::kQ4}, decode_q4_0},     {{3, 32, 20, Format::kQ4m}, decode_q4_1},
    {{6, 32, 22, Format::kQ5}, decode_q5_0},     {{7, 32, 24, Format::kQ5m}, decode_q5_1},
    {{8, 32, 34, Format::kQ8}, decode_q8_0},     {{12, 256, 144, Format::kQ4m}, decode_q4_k},
    {{13, 256, 176, Format::kQ5m}, decode_q5_k}, {{14, 256, 210, Format::kQ6}, decode_q6_k},
};

}  // namespace

const GgufType* gguf_type(int id) {
  for (const Source& source : kSources) {
    if (source.type.id == id) return &source.type;
  }
  return nullptr;
}

void pack_gguf(const GgufType& type, const uint8_t* const* source, const PackedView& out) {
  DecodeFn decode = nullptr;
  for (const Source& entry : kSources) {
    if (entry.type.id == type.id) decode = entry.decode;
  }
  const int groups_per_block = type.columns / kGroup;
  parallel_for(out.panels(), [&](int64_t panel) {
    uint8_t* to = out.data + panel * out.panel_bytes();
    for (int r = 0; r < kPanelRows; ++r) {
      const int64_t row = panel * kPanelRows + r;
      std::vector<RowGroup> groups(static_cast<size_t>(out.groups()));
      if (row < out.rows) {
        const uint8_t* from = source[row];
        for (int64_t g = 0; g < out.groups(); g += groups_per_block, from += type.bytes) {
          decode(from, &groups[static_cast<size_t>(g)]);
        }
      }
      write_row(out.format, groups.data(), out.groups(), r, to);
    }
  });
}

}  // namespace minisgl
