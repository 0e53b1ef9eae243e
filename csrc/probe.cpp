#include "probe.h"

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

#include "isa.h"
#include "pool.h"

namespace minisgl {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::atomic<uint64_t> g_sink;

uint64_t read_words(const uint8_t* data, int64_t bytes) {
  uint64_t sum[8] = {};
  for (int64_t i = 0; i < bytes; i += 64) {
    uint64_t word[8];
    std::memcpy(word, data + i, sizeof(word));
    for (int j = 0; j < 8; ++j) sum[j] += word[j];
  }
  return sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}

uint64_t multiply_bytes(int64_t steps) {
  int32_t sum[16] = {}, a[16], b[16];
  for (int i = 0; i < 16; ++i) {
    a[i] = static_cast<int8_t>(i + steps);
    b[i] = static_cast<int8_t>(i * 3 - steps);
  }
  for (int64_t s = 0; s < steps; ++s) {
    for (int i = 0; i < 16; ++i) sum[i] += a[i] * b[(i + s) & 15];
  }
  uint64_t total = 0;
  for (const int32_t value : sum) total += static_cast<uint64_t>(value);
  return total;
}

ProbeFns choose() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return probe_avx512();
    case Isa::kAvxVnni:
    case Isa::kAvx2:
      return probe_avx2();
#endif
    default:
      return probe_portable();
  }
}

}  // namespace

ProbeFns probe_portable() { return {read_words, multiply_bytes, 32}; }

double probe_read(int64_t bytes, int repeats) {
  constexpr int64_t kHuge = 2 << 20;
  constexpr int64_t kChunk = 128 << 10;
  const ProbeFns fns = choose();
  const int64_t chunks = bytes / kChunk;
  const size_t size = static_cast<size_t>((chunks * kChunk + kHuge - 1) / kHuge * kHuge);
  auto* data = static_cast<uint8_t*>(std::aligned_alloc(kHuge, size));
  if (data == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(data, size, MADV_HUGEPAGE);
#endif
  std::memset(data, 1, size);
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    const auto start = Clock::now();
    parallel_for(chunks, [&](int64_t c) { g_sink += fns.read(data + c * kChunk, kChunk); });
    const double rate = static_cast<double>(chunks * kChunk) / seconds_since(start);
    if (rate > best) best = rate;
  }
  std::free(data);
  return best;
}

double probe_multiply(int64_t steps, int repeats) {
  const ProbeFns fns = choose();
  const int64_t tasks = 16 * num_threads();
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    const auto start = Clock::now();
    parallel_for(tasks, [&](int64_t) { g_sink += fns.multiply(steps); });
    const double ops = static_cast<double>(tasks * steps * fns.ops_per_step);
    const double rate = ops / seconds_since(start);
    if (rate > best) best = rate;
  }
  return best;
}

}  // namespace minisgl
