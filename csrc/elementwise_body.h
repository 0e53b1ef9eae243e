// The row kernels, written once over the compiler's own vectors, as wide as the target's registers:
// each elementwise_<isa>.cpp compiles them with its flags. Everything is in an unnamed namespace:
// code compiled for one instruction set must never be merged by the linker with that of another.
// Vectors are passed by reference: their calling convention differs by target.
//
// A sum over a row has 16 partial sums whatever the width of a register: lane i takes the elements
// i, i + 16, and so on.
#pragma once

#include <cmath>
#include <cstring>

#include "elementwise.h"

#pragma GCC diagnostic ignored "-Wpsabi"

namespace minisgl {
namespace {

#define MINISGL_ROW_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kSums = 16;                    // partial sums of a row
constexpr int kWidth = kVectorBytes / 4;     // lanes of a register
constexpr int kRegisters = kSums / kWidth;   // that hold the partial sums
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));

MINISGL_ROW_INLINE Floats load(const float* p) {
  Floats a;
  std::memcpy(&a, p, sizeof(a));
  return a;
}
MINISGL_ROW_INLINE void store(float* p, const Floats& a) { std::memcpy(p, &a, sizeof(a)); }
MINISGL_ROW_INLINE Floats splat(float a) { return a - Floats{}; }

// Adds up the partial sums: lane i with i + 8, then i + 4, i + 2, i + 1.
MINISGL_ROW_INLINE float sum_lanes(const Floats (&sums)[kRegisters]) {
  float lane[kSums];
  std::memcpy(lane, sums, sizeof(lane));
  for (int half = kSums / 2; half > 0; half /= 2) {
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

// The last few elements of one or two rows, copied into blocks of 16 with zeros behind them.
struct Tail {
  float in[2][kSums] = {};
  float out[kSums];
  size_t bytes;

  MINISGL_ROW_INLINE Tail(const float* a, const float* b, int64_t left)
      : bytes(static_cast<size_t>(left) * sizeof(float)) {
    std::memcpy(in[0], a, bytes);
    if (b != nullptr) std::memcpy(in[1], b, bytes);
  }
  MINISGL_ROW_INLINE void write(float* to) const { std::memcpy(to, out, bytes); }
};

MINISGL_ROW_INLINE void add_squares(const float* x, Floats (&sums)[kRegisters]) {
  for (int r = 0; r < kRegisters; ++r) {
    const Floats value = load(x + r * kWidth);
    sums[r] += value * value;
  }
}

MINISGL_ROW_INLINE void add_block(const float* x, const float* y, float* out) {
  for (int r = 0; r < kRegisters; ++r) {
    store(out + r * kWidth, load(x + r * kWidth) + load(y + r * kWidth));
  }
}

MINISGL_ROW_INLINE void finish_norm(const float* x, const float* weight, int64_t n, float eps,
                                    const Floats (&squares)[kRegisters], float* out) {
  const float scale = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(n) + eps);
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, load(x + i) * scale * load(weight + i));
  for (; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  Floats squares[kRegisters] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) add_squares(x + i, squares);
  if (i < n) add_squares(Tail(x + i, nullptr, n - i).in[0], squares);
  finish_norm(x, weight, n, eps, squares, out);
}

void add_rms_norm(const float* x, float* residual, const float* weight, int64_t n, float eps,
                  float* out) {
  Floats squares[kRegisters] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    add_block(residual + i, x + i, residual + i);
    add_squares(residual + i, squares);
  }
  if (i < n) {
    Tail tail(residual + i, x + i, n - i);
    add_block(tail.in[0], tail.in[1], tail.out);
    add_squares(tail.out, squares);
    tail.write(residual + i);
  }
  finish_norm(residual, weight, n, eps, squares, out);
}

template <Activation kKind>
MINISGL_ROW_INLINE Floats activate(const Floats& x) {
  if constexpr (kKind == Activation::kSilu) return x / (1.0f + exponential(-x));
  // tanh(u) = 2 * sigmoid(2u) - 1, so 0.5 * x * (1 + tanh(u)) = x * sigmoid(2u).
  const Floats twice = 1.5957691216057308f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exponential(-twice));
}

template <Activation kKind>
MINISGL_ROW_INLINE void gate_block(const float* gate, const float* up, float* out) {
  for (int r = 0; r < kRegisters; ++r) {
    store(out + r * kWidth, activate<kKind>(load(gate + r * kWidth)) * load(up + r * kWidth));
  }
}

template <Activation kKind>
void gate_mul(const float* gate, const float* up, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) gate_block<kKind>(gate + i, up + i, out + i);
  if (i < n) {
    Tail tail(gate + i, up + i, n - i);
    gate_block<kKind>(tail.in[0], tail.in[1], tail.out);
    tail.write(out + i);
  }
}

void add(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += y[i];
}

// The largest of 16 * steps elements, NaNs left out; `nan` gathers where there were any.
MINISGL_ROW_INLINE float largest_of(const float* x, int64_t steps, Ints (&nan)[kRegisters]) {
  Floats best[kRegisters];
  for (int r = 0; r < kRegisters; ++r) best[r] = splat(-INFINITY);
  for (int64_t i = 0; i < steps; ++i, x += kSums) {
    for (int r = 0; r < kRegisters; ++r) {
      const Floats value = load(x + r * kWidth);
      best[r] = value > best[r] ? value : best[r];
      nan[r] |= value != value;
    }
  }
  float lane[kSums];
  std::memcpy(lane, best, sizeof(lane));
  for (int half = kSums / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] = lane[i + half] > lane[i] ? lane[i + half] : lane[i];
  }
  return lane[0];
}

ArgMax arg_max(const float* x, int64_t n) {
  constexpr int64_t kSteps = 32, kSection = kSteps * kSums;  // looked through again for the index
  Ints nan[kRegisters] = {};
  float top = -INFINITY;
  int64_t section = 0, i = 0;
  for (; i + kSection <= n; i += kSection) {
    const float value = largest_of(x + i, kSteps, nan);
    if (value > top) {
      top = value;
      section = i;
    }
  }
  int32_t is_nan[kSums];
  std::memcpy(is_nan, nan, sizeof(is_nan));
  for (int lane = 1; lane < kSums; ++lane) is_nan[0] |= is_nan[lane];
  for (; i < n; ++i) {
    is_nan[0] |= x[i] != x[i];
    if (x[i] > top) {
      top = x[i];
      section = i;
    }
  }
  if (is_nan[0]) {
    for (int64_t at = 0; at < n; ++at) {
      if (x[at] != x[at]) return {x[at], at};
    }
  }
  for (int64_t at = section; at < n; ++at) {
    if (x[at] == top) return {x[at], at};
  }
  return {top, 0};
}

SoftmaxStats softmax_stats(const float* x, int64_t n, float inverse_temperature) {
  const float max = arg_max(x, n).value;
  Floats sums[kRegisters] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (int r = 0; r < kRegisters; ++r) {
      sums[r] += exponential((load(x + i + r * kWidth) - max) * inverse_temperature);
    }
  }
  float lane[kSums];
  std::memcpy(lane, sums, sizeof(lane));
  for (int at = 0; i < n; ++i, ++at) {
    lane[at] += exponential(splat((x[i] - max) * inverse_temperature))[0];
  }
  std::memcpy(sums, lane, sizeof(lane));
  return {max, sum_lanes(sums)};
}

void lane_maxima(const float* x, int64_t sections, int64_t steps, float* out) {
  for (int64_t s = 0; s < sections; ++s, out += kSums) {
    Floats best[kRegisters];
    for (int r = 0; r < kRegisters; ++r) best[r] = splat(-INFINITY);
    for (int64_t i = 0; i < steps; ++i, x += kSums) {
      for (int r = 0; r < kRegisters; ++r) {
        const Floats value = load(x + r * kWidth);
        best[r] = value > best[r] ? value : best[r];
      }
    }
    for (int r = 0; r < kRegisters; ++r) store(out + r * kWidth, best[r]);
  }
}

constexpr ElementwiseKernels kRowKernels = {
    rms_norm, add_rms_norm, {gate_mul<Activation::kSilu>, gate_mul<Activation::kGeluTanh>},
    add,      arg_max,      softmax_stats, lane_maxima};

}  // namespace
}  // namespace minisgl
