// Operations on rows of floats: norms, gated activations, sums, and what sampling needs.
//
// A row's result depends on that row alone. Sums have 16 partial sums and one fixed tree; exp() and
// the reciprocal of a gate are our own, fused multiply-adds where written: every instruction set
// gives the same bits.
#pragma once

#include <cstdint>

namespace minisgl {

enum class Activation : int { kSilu = 0, kGeluTanh = 1 };
constexpr int kNumActivations = 2;

// The largest element and its first index; a row with a NaN gives NaN (and the index of a NaN).
struct ArgMax {
  float value;
  int64_t index;
};

// sum = sum over i of exp((x[i] - max) * inverse_temperature).
struct SoftmaxStats {
  float max, sum;
};

// Kernels on one row of n elements. Outputs may be the inputs themselves.
struct ElementwiseKernels {
  // out = x / sqrt(mean(x^2) + eps) * weight
  void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);
  // residual += x, then out = rms_norm(residual)
  void (*add_rms_norm)(const float* x, float* residual, const float* weight, int64_t n, float eps,
                       float* out);
  // out = activation(gate) * up
  void (*gate_mul[kNumActivations])(const float* gate, const float* up, int64_t n, float* out);
  // x += y
  void (*add)(float* x, const float* y, int64_t n);
  ArgMax (*arg_max)(const float* x, int64_t n);
  SoftmaxStats (*softmax_stats)(const float* x, int64_t n, float inverse_temperature);
  // out[16 * s + lane] = the largest x[16 * i + lane], i in [s * steps, (s + 1) * steps), for each
  // whole section s of 16 * steps elements; NaNs count as -infinity.
  void (*lane_maxima)(const float* x, int64_t sections, int64_t steps, float* out);
};

const ElementwiseKernels& elementwise_kernels_portable();
const ElementwiseKernels& elementwise_kernels_neon();
const ElementwiseKernels& elementwise_kernels_avx2();
const ElementwiseKernels& elementwise_kernels_avx512();

// Those of the instruction set in force.
const ElementwiseKernels& elementwise_kernels();

// Calls body(row) for each row, in parallel where the work (elements in all) outweighs handing it
// out. Defined for any body that touches its own row only.
template <class Body>
void for_rows(int64_t rows, int64_t elements_per_row, Body&& body);

// Writes the k largest elements of a row and their indices in falling order, equal ones by rising
// index; NaNs are never chosen. Returns how many there were to choose (at most k). Reads the row
// twice and sorts only what it found.
int64_t top_candidates(const float* x, int64_t n, int64_t k, float* values, int32_t* indices);

// What changes a row of logits before a token is chosen; formulas as in engine/logits.py.
// counts: how often each token was generated; seen: whether it occurred at all. Either may be null
// if its penalty is off.
struct Penalties {
  float repetition = 1.0f, frequency = 0.0f, presence = 0.0f;
  const int32_t* counts = nullptr;
  const uint8_t* seen = nullptr;
};
void apply_penalties(float* logits, int64_t n, const Penalties& penalties);

}  // namespace minisgl

#include "elementwise_rows.h"
