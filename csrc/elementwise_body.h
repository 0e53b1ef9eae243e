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

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

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

// What the compiler's vectors have no operators for: c + a * b and c - a * b, rounded once.
MINISGL_ROW_INLINE Floats fma(const Floats& a, const Floats& b, const Floats& c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  Floats sum;
  for (int i = 0; i < kWidth; ++i) sum[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return sum;
#endif
}
MINISGL_ROW_INLINE Floats fnma(const Floats& a, const Floats& b, const Floats& c) {
#if defined(__AVX512F__)
  return _mm512_fnmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fnmadd_ps(a, b, c);
#else
  return fma(-a, b, c);
#endif
}

// a > b ? a : b, and a < b ? a : b; of a NaN and a number the second. x86 has just that.
MINISGL_ROW_INLINE Floats larger(const Floats& a, const Floats& b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
MINISGL_ROW_INLINE Floats smaller(const Floats& a, const Floats& b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

MINISGL_ROW_INLINE Ints bits_of(const Floats& x) {
  Ints bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
MINISGL_ROW_INLINE Floats of_bits(const Ints& bits) {
  Floats x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// c + exp(-x); x saturates at 87 of either sign, NaN stays NaN. -x = n * log(2) - r, and exp(-r) is
// a minimax polynomial, relative error 3e-9; log(2) as one float adds 2e-9 for each n.
MINISGL_ROW_INLINE Floats add_decay(const Floats& c, const Floats& value) {
  const Floats x = larger(splat(-87.0f), smaller(splat(87.0f), value));
  // 1.5 * 2^23 + 127: the low bits of the sum hold the integer n and the bias of an exponent.
  const Floats magic = splat(12583039.0f);
  const Floats shifted = fnma(x, splat(1.44269504f), magic);
  const Floats r = fma(shifted - magic, splat(0.693147181f), x);
  Floats p = splat(0x1.6ad158p-10f);
  p = fma(p, r, splat(-0x1.123f30p-7f));
  p = fma(p, r, splat(0x1.55584ep-5f));
  p = fma(p, r, splat(-0x1.55548ap-3f));
  p = fma(p, r, splat(0x1.fffffcp-2f));
  p = fma(p, r, splat(-1.0f));
  p = fma(p, r, splat(1.0f));
  return fma(p, of_bits(bits_of(shifted) << 23), c);
}

// 1 / d for d in [1, 2^125.9], to one unit in the last place; NaN stays NaN. A division takes as
// long as the rest of a gate. The difference of bits is within 5.1 % of 1 / d; the first step
// squares what is left, the second cubes it.
MINISGL_ROW_INLINE Floats reciprocal(const Floats& d) {
  Floats y = of_bits(0x7ef311c7 - bits_of(d));
  y = y * fnma(d, y, splat(2.0f));
  const Floats left = fnma(d, y, splat(1.0f));
  return fma(y, fma(left, left, left), y);
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

// x / (1 + exp(-u)), u = x for silu. tanh(u) = 2 * sigmoid(2u) - 1 makes the other of that form.
template <Activation kKind>
MINISGL_ROW_INLINE Floats activate(const Floats& x) {
  Floats u = x;
  if constexpr (kKind == Activation::kGeluTanh) {
    u = x * fma(x * x, splat(0.0713548162726f), splat(1.59576912161f));
  }
  return x * reciprocal(add_decay(splat(1.0f), u));
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

// What arg_max looks through at once, and again for the index.
constexpr int kSection = 512;

// The largest of a section, NaNs left out. `total` becomes NaN if there was one, and also where
// infinities of both signs meet.
MINISGL_ROW_INLINE float largest_of(const float* x, Floats* total) {
  constexpr int kChains = 4;
  Floats best[kChains], sums[kChains];
  for (int c = 0; c < kChains; ++c) best[c] = sums[c] = load(x + c * kWidth);
  for (int c = 0; c < kChains; ++c) best[c] = larger(best[c], splat(-INFINITY));
  for (int i = kChains * kWidth; i < kSection; i += kChains * kWidth) {
    for (int c = 0; c < kChains; ++c) {
      const Floats value = load(x + i + c * kWidth);
      best[c] = larger(value, best[c]);
      sums[c] += value;
    }
  }
  *total += (sums[0] + sums[1]) + (sums[2] + sums[3]);
  best[0] = larger(larger(best[0], best[1]), larger(best[2], best[3]));
  float lane[kWidth];
  store(lane, best[0]);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] = lane[i + half] > lane[i] ? lane[i + half] : lane[i];
  }
  return lane[0];
}

ArgMax arg_max(const float* x, int64_t n) {
  Floats totals = {};
  float top = -INFINITY, total = 0.0f;
  int64_t section = 0, i = 0;
  for (; i + kSection <= n; i += kSection) {
    const float value = largest_of(x + i, &totals);
    if (value > top) {
      top = value;
      section = i;
    }
  }
  for (int lane = 0; lane < kWidth; ++lane) total += totals[lane];
  for (; i < n; ++i) {
    total += x[i];
    if (x[i] > top) {
      top = x[i];
      section = i;
    }
  }
  if (total != total) {
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
      const Floats below = max - load(x + i + r * kWidth);
      sums[r] = add_decay(sums[r], below * inverse_temperature);
    }
  }
  float lane[kSums];
  std::memcpy(lane, sums, sizeof(lane));
  for (int at = 0; i < n; ++i, ++at) {
    lane[at] = add_decay(splat(lane[at]), splat((max - x[i]) * inverse_temperature))[0];
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
        best[r] = larger(value, best[r]);
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
