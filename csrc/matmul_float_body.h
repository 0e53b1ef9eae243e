// The float product, written once over a class F of 16 float lanes; see matmul_body.h for why
// everything here is in an unnamed namespace.
//
// A dot product keeps 16 partial sums, lane i taking the columns i, i + 16, ..., and adds them up
// in one fixed tree at the end. Tiles of rows by tokens only share loads, never sums.
#pragma once

#include "matmul_body.h"

namespace minisgl {
namespace {

constexpr int kLanes16 = 16;

template <FloatKind kKind>
struct Element;
template <>
struct Element<FloatKind::kFloat32> {
  using Type = float;
};
template <>
struct Element<FloatKind::kBfloat16> {
  using Type = uint16_t;
};
template <>
struct Element<FloatKind::kFloat16> {
  using Type = uint16_t;
};

template <class F, FloatKind kKind>
MINISGL_INLINE typename F::Vec load_weight(const typename Element<kKind>::Type* p) {
  if constexpr (kKind == FloatKind::kFloat32) return F::load(p);
  if constexpr (kKind == FloatKind::kBfloat16) return F::load_bfloat16(p);
  if constexpr (kKind == FloatKind::kFloat16) return F::load_float16(p);
}

// The last, incomplete step over the columns: the same step with zeros.
template <class F, FloatKind kKind, int R, int C>
void tail_step(const typename Element<kKind>::Type* const (&w)[R], const float* const (&x)[C],
               int64_t k, int64_t left, typename F::Vec (&acc)[R][C]) {
  using W = typename Element<kKind>::Type;
  typename F::Vec column[C];
  for (int c = 0; c < C; ++c) {
    float buffer[kLanes16] = {};
    __builtin_memcpy(buffer, x[c] + k, static_cast<size_t>(left) * sizeof(float));
    column[c] = F::load(buffer);
  }
  for (int r = 0; r < R; ++r) {
    W buffer[kLanes16] = {};
    __builtin_memcpy(buffer, w[r] + k, static_cast<size_t>(left) * sizeof(W));
    const typename F::Vec row = load_weight<F, kKind>(buffer);
    for (int c = 0; c < C; ++c) acc[r][c] = F::fma(row, column[c], acc[r][c]);
  }
}

// R rows by C tokens.
template <class F, FloatKind kKind, int R, int C>
void float_tile(const FloatTask& task, int64_t row, int64_t token) {
  using W = typename Element<kKind>::Type;
  const W* w[R];
  const float* x[C];
  for (int r = 0; r < R; ++r) {
    w[r] = static_cast<const W*>(task.weight) + (row + r) * task.weight_stride;
  }
  for (int c = 0; c < C; ++c) x[c] = task.x + (token + c) * task.x_stride;
  typename F::Vec acc[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) acc[r][c] = F::zero();
  }
  int64_t k = 0;
  for (; k + kLanes16 <= task.columns; k += kLanes16) {
    typename F::Vec column[C];
    for (int c = 0; c < C; ++c) column[c] = F::load(x[c] + k);
    for (int r = 0; r < R; ++r) {
      const typename F::Vec weight = load_weight<F, kKind>(w[r] + k);
      for (int c = 0; c < C; ++c) acc[r][c] = F::fma(weight, column[c], acc[r][c]);
    }
  }
  if (k < task.columns) tail_step<F, kKind, R, C>(w, x, k, task.columns - k, acc);
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      task.out[(token + c) * task.out_stride + row + r] = F::sum(acc[r][c]);
    }
  }
}

template <class F, FloatKind kKind, int R>
void float_rows(const FloatTask& task, int64_t row) {
  int64_t t = 0;
  for (; t + F::kTokens <= task.tokens; t += F::kTokens) {
    float_tile<F, kKind, R, F::kTokens>(task, row, t);
  }
  for (; t + 2 <= task.tokens; t += 2) float_tile<F, kKind, R, 2>(task, row, t);
  for (; t < task.tokens; ++t) float_tile<F, kKind, R, 1>(task, row, t);
}

template <class F, FloatKind kKind>
void run_float(const FloatTask& task) {
  int64_t row = 0;
  for (; row + F::kRows <= task.rows; row += F::kRows) float_rows<F, kKind, F::kRows>(task, row);
  for (; row < task.rows; ++row) float_rows<F, kKind, 1>(task, row);
}

template <class F>
constexpr void fill_float(MatmulKernels* kernels) {
  kernels->floats[0] = run_float<F, FloatKind::kFloat32>;
  kernels->floats[1] = run_float<F, FloatKind::kBfloat16>;
  kernels->floats[2] = run_float<F, FloatKind::kFloat16>;
}

}  // namespace
}  // namespace minisgl
