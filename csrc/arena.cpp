#include "arena.h"

#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <new>

namespace minisgl {
namespace {

constexpr int64_t kHuge = 2 << 20, kChunk = 32 << 20, kLine = 64;

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Pages that are never written cost nothing, so a chunk may be larger than what goes into it.
std::shared_ptr<uint8_t> make_chunk(int64_t bytes) {
  const size_t size = static_cast<size_t>(round_up(bytes, kHuge));
  auto* data = static_cast<uint8_t*>(std::aligned_alloc(kHuge, size));
  if (data == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(data, size, MADV_HUGEPAGE);
#endif
  return std::shared_ptr<uint8_t>(data, [](uint8_t* p) { std::free(p); });
}

}  // namespace

std::shared_ptr<uint8_t> weight_memory(int64_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<uint8_t> current;  // its weights keep it alive
  static int64_t used = 0;
  const int64_t size = round_up(bytes, kLine);
  std::lock_guard<std::mutex> lock(mutex);
  if (size > kChunk / 2) return make_chunk(size);
  std::shared_ptr<uint8_t> chunk = current.lock();
  if (chunk == nullptr || used + size > kChunk) {
    chunk = make_chunk(kChunk);
    current = chunk;
    used = 0;
  }
  used += size;
  return std::shared_ptr<uint8_t>(chunk, chunk.get() + (used - size));
}

}  // namespace minisgl
