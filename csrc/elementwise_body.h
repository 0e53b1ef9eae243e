// The row kernels, written once over the compiler's own 16-lane vectors: each elementwise_<isa>.cpp
// compiles them with its flags, and the compiler cuts a vector into registers. Everything is in an
// unnamed namespace: code compiled for one instruction set must never be merged by the linker with
// that of another. Vectors are passed by reference: their calling convention differs by target.
#pragma once

#include <cmath>
#include <cstring>

#include "elementwise.h"

#pragma GCC diagnostic ignored "-Wpsabi"

namespace minisgl {
namespace {

#define MINISGL_ROW_INLINE inline __attribute__((always_inline))

constexpr int kRowLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

MINISGL_ROW_INLINE Floats load(const float* p) {
  Floats a;
  std::memcpy(&a, p, sizeof(a));
  return a;
}
MINISGL_ROW_INLINE void store(float* p, const Floats& a) { std::memcpy(p, &a, sizeof(a)); }
MINISGL_ROW_INLINE Floats splat(float a) { return a - Floats{}; }

// The last few elements of a row, with zeros behind them.
MINISGL_ROW_INLINE Floats load_tail(const float* p, int64_t left) {
  Floats a = {};
  std::memcpy(&a, p, static_cast<size_t>(left) * sizeof(float));
  return a;
}
MINISGL_ROW_INLINE void store_tail(float* p, const Floats& a, int64_t left) {
  std::memcpy(p, &a, static_cast<size_t>(left) * sizeof(float));
}

// Lane i with i + 8, then i + 4, i + 2, i + 1.
MINISGL_ROW_INLINE float sum_lanes(const Floats& a) {
  float lane[kRowLanes];
  std::memcpy(lane, &a, sizeof(lane));
  for (int half = kRowLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

// Cephes' expf, to about one unit in the last place; saturates instead of overflowing.
MINISGL_ROW_INLINE Floats exponential(const Floats& value) {
  Floats x = value > 88.0f ? splat(88.0f) : value;
  x = x < -87.0f ? splat(-87.0f) : x;
  // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits.
  const float magic = 12582912.0f;
  const Floats shifted = x * 1.44269504088896341f + magic;
  const Floats n = shifted - magic;
  x = x - n * 0.693359375f;
  x = x + n * 2.12194440e-4f;
  Floats y = x * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  y = y * (x * x) + x + 1.0f;
  Ints bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits - 0x4b400000 + 127) << 23;
  Floats power;
  std::memcpy(&power, &bits, sizeof(power));
  return y * power;
}

MINISGL_ROW_INLINE float norm_scale(const Floats& squares, int64_t n, float eps) {
  return 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(n) + eps);
}

MINISGL_ROW_INLINE void scale_row(const float* x, const float* weight, int64_t n, float scale,
                                  float* out) {
  int64_t i = 0;
  for (; i + kRowLanes <= n; i += kRowLanes) store(out + i, load(x + i) * scale * load(weight + i));
  for (; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

MINISGL_ROW_INLINE Floats load_any(const float* p, int64_t i, int64_t n) {
  return i + kRowLanes <= n ? load(p + i) : load_tail(p + i, n - i);
}

void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  Floats squares = {};
  for (int64_t i = 0; i < n; i += kRowLanes) {
    const Floats value = load_any(x, i, n);
    squares += value * value;
  }
  scale_row(x, weight, n, norm_scale(squares, n, eps), out);
}

void add_rms_norm(const float* x, float* residual, const float* weight, int64_t n, float eps,
                  float* out) {
  Floats squares = {};
  for (int64_t i = 0; i < n; i += kRowLanes) {
    const Floats sum = load_any(residual, i, n) + load_any(x, i, n);
    if (i + kRowLanes <= n) {
      store(residual + i, sum);
    } else {
      store_tail(residual + i, sum, n - i);
    }
    squares += sum * sum;
  }
  scale_row(residual, weight, n, norm_scale(squares, n, eps), out);
}

template <Activation kKind>
MINISGL_ROW_INLINE Floats activate(const Floats& x) {
  if constexpr (kKind == Activation::kSilu) return x / (1.0f + exponential(-x));
  // tanh(u) = 2 * sigmoid(2u) - 1, so 0.5 * x * (1 + tanh(u)) = x * sigmoid(2u).
  const Floats twice = 1.5957691216057308f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exponential(-twice));
}

template <Activation kKind>
void gate_mul(const float* gate, const float* up, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kRowLanes <= n; i += kRowLanes) {
    store(out + i, activate<kKind>(load(gate + i)) * load(up + i));
  }
  if (i < n) {
    const Floats last = activate<kKind>(load_tail(gate + i, n - i)) * load_tail(up + i, n - i);
    store_tail(out + i, last, n - i);
  }
}

void add(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += y[i];
}

ArgMax arg_max(const float* x, int64_t n) {
  Floats best = splat(-INFINITY);
  Ints nan = {};
  int64_t i = 0;
  for (; i + kRowLanes <= n; i += kRowLanes) {
    const Floats value = load(x + i);
    best = value > best ? value : best;
    nan |= value != value;
  }
  float top = -INFINITY;
  int32_t any_nan = 0;
  for (int lane = 0; lane < kRowLanes; ++lane) {
    if (best[lane] > top) top = best[lane];
    any_nan |= nan[lane];
  }
  for (; i < n; ++i) {
    if (x[i] > top) top = x[i];
    any_nan |= x[i] != x[i];
  }
  for (int64_t at = 0; at < n; ++at) {
    if (any_nan ? x[at] != x[at] : x[at] == top) return {x[at], at};
  }
  return {top, 0};
}

SoftmaxStats softmax_stats(const float* x, int64_t n, float inverse_temperature) {
  const float max = arg_max(x, n).value;
  Floats sum = {};
  int64_t i = 0;
  for (; i + kRowLanes <= n; i += kRowLanes) {
    sum += exponential((load(x + i) - max) * inverse_temperature);
  }
  if (i < n) {
    Floats last = exponential((load_tail(x + i, n - i) - max) * inverse_temperature);
    for (int lane = static_cast<int>(n - i); lane < kRowLanes; ++lane) last[lane] = 0.0f;
    sum += last;
  }
  return {max, sum_lanes(sum)};
}

constexpr ElementwiseKernels kRowKernels = {
    rms_norm, add_rms_norm, {gate_mul<Activation::kSilu>, gate_mul<Activation::kGeluTanh>},
    add,      arg_max,      softmax_stats};

}  // namespace
}  // namespace minisgl
