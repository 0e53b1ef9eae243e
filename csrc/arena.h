// Memory for weights: side by side in chunks that ask for huge pages, so that a product which
// streams through many small matrices needs few address translations.
#pragma once

#include <cstdint>
#include <memory>

namespace minisgl {

// `bytes` of memory on a cache line's boundary, uninitialised. A chunk is given back when nothing
// in it is used any more. Throws std::bad_alloc.
std::shared_ptr<uint8_t> weight_memory(int64_t bytes);

}  // namespace minisgl
