// Filling and reading packed weights: from GGUF blocks without a detour over floats, from floats,
// and back to floats.
#pragma once

#include <cstdint>

#include "format.h"
#include "matmul.h"

namespace minisgl {

// A block type of GGUF files, by its number there.
struct GgufType {
  int id;
  int columns, bytes;  // of one source block
  Format format;
};

// Returns nullptr for types that cannot be packed.
const GgufType* gguf_type(int id);

// `source[r]` points at the columns / type.columns source blocks of row r.
void pack_gguf(const GgufType& type, const uint8_t* const* source, const PackedView& out);

// Format kQ4m or kQ8, from rows `stride` elements apart. Throws std::invalid_argument on others.
void pack_float(FloatKind kind, const void* source, int64_t stride, const PackedView& out);

// Row `row` as `columns` floats.
void unpack_row(const PackedView& weight, int64_t row, float* out);

}  // namespace minisgl
