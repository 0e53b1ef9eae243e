// The two ceilings of this machine, measured with the pool's threads: how fast memory can be read,
// and how fast 8-bit products can be computed in registers.
#pragma once

#include <cstdint>

namespace minisgl {

// Bytes per second, the best of `repeats` passes over `bytes` of memory.
double probe_read(int64_t bytes, int repeats);

// 8-bit operations per second (a multiplication and an addition count as two), with the best
// instruction set in force; the best of `repeats`.
double probe_multiply(int64_t steps, int repeats);

// Sums a buffer of whole 64-byte lines; runs `steps` rounds of 12 independent multiply-adds.
// Both return a value that the caller must use. probe_ops: 8-bit operations per step.
struct ProbeFns {
  uint64_t (*read)(const uint8_t* data, int64_t bytes);
  uint64_t (*multiply)(int64_t steps);
  int64_t ops_per_step;
};

ProbeFns probe_portable();
ProbeFns probe_avx2();
ProbeFns probe_avx512();

}  // namespace minisgl
