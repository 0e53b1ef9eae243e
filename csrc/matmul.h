// Products of packed weights with quantised activations, and of plain float weights with floats.
//
// Every output element is one sum over groups (or columns) in one fixed order, whatever the number
// of tokens, threads or the instruction set: results are equal to the bit. Work is split over
// panels of output rows and over tokens, never over columns.
#pragma once

#include <cstdint>

#include "activations.h"
#include "format.h"

namespace minisgl {

// One of several products in one parallel region: out[t * out_stride + row] for each token and row.
struct PackedJob {
  const Activations* x;
  PackedView weight;
  float* out;
  int64_t out_stride;
};
void matmul_packed(const PackedJob* jobs, int64_t num_jobs);

using GateFn = void (*)(const float* gate, const float* up, int64_t n, float* out);

// out = the quantised combine(gate . x, up . x); both weights have a multiple of 32 rows. A part of
// the products is combined and quantised while it is in the first-level cache: the floats of the
// whole never exist.
struct GatedJob {
  const Activations* x;
  PackedView gate, up;
  Activations* out;
};
void matmul_gated(const GatedJob* jobs, int64_t num_jobs, GateFn combine);

// What a kernel works on: a range of panels times one tile of tokens.
struct PanelTask {
  const uint8_t* weight;  // first panel of the range
  int64_t panel_bytes;
  int64_t groups;
  int64_t panels;
  int64_t rows;  // valid output rows in the range: panels * 16, or less at the very end
  ActivationTile x;
  float* out;  // of the first token of the tile and the first row of the range
  int64_t out_stride;
};

using PanelFn = void (*)(const PanelTask& task);

enum class FloatKind : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };
constexpr int kNumFloatKinds = 3;

// y[t][n] = sum over k of x[t][k] * w[n][k], for a block of rows n and tokens t.
struct FloatTask {
  const void* weight;
  int64_t weight_stride;  // elements
  const float* x;
  int64_t x_stride;
  float* out;
  int64_t out_stride;
  int64_t rows, tokens, columns;
};

using FloatFn = void (*)(const FloatTask& task);

void matmul_float(FloatKind kind, const FloatTask& whole);

// The kernels of one instruction set.
struct MatmulKernels {
  PanelFn packed[kNumFormats];
  FloatFn floats[kNumFloatKinds];
};

const MatmulKernels& matmul_kernels_portable();
const MatmulKernels& matmul_kernels_neon();
const MatmulKernels& matmul_kernels_avx2();
const MatmulKernels& matmul_kernels_avxvnni();
const MatmulKernels& matmul_kernels_avx512();

}  // namespace minisgl
