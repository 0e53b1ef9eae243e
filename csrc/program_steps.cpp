// The steps that every program is made of; attention has a file of its own.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "half.h"
#include "pack.h"
#include "program.h"

namespace minisgl {
namespace {

[[noreturn]] void fail(const char* what) { throw std::invalid_argument(what); }

void widen_row(FloatKind kind, const void* from, int64_t n, float* to) {
  const auto* half = static_cast<const uint16_t*>(from);
  switch (kind) {
    case FloatKind::kFloat32:
      std::memcpy(to, from, static_cast<size_t>(n) * 4);
      return;
    case FloatKind::kFloat16:
      for (int64_t i = 0; i < n; ++i) to[i] = half_to_float(half[i]);
      return;
    case FloatKind::kBfloat16:
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = static_cast<uint32_t>(half[i]) << 16;
        std::memcpy(to + i, &bits, 4);
      }
  }
}

int64_t num_groups(int64_t columns) { return (columns + kGroup - 1) / kGroup; }

int64_t float_bytes(FloatKind kind) { return kind == FloatKind::kFloat32 ? 4 : 2; }

}  // namespace

void multiply(const std::vector<MatrixRef>& parts, const Activations* quantized, const float* x,
              int64_t x_stride, int64_t tokens, float* out, int64_t out_stride) {
  constexpr int64_t kMostJobs = 8;  // in one parallel region
  PackedJob jobs[kMostJobs];
  int64_t num_jobs = 0;
  for (const MatrixRef& part : parts) {
    if (part.packed) {
      if (num_jobs == kMostJobs) matmul_packed(jobs, std::exchange(num_jobs, 0));
      jobs[num_jobs++] = {quantized, part.view, out, out_stride};
    } else {
      matmul_float(part.kind, {part.data, part.stride, x, x_stride, out, out_stride,
                               part.view.rows, tokens, part.view.columns});
    }
    out += part.view.rows;
  }
  matmul_packed(jobs, num_jobs);
}

GatedWeights GatedWeights::of(const std::vector<MatrixRef>& gate_up, int64_t inner) {
  std::vector<PackedView> halves;
  int64_t rows = 0;
  for (const MatrixRef& part : gate_up) {
    if (!part.packed) fail("gate and up are not packed");
    rows += part.view.rows;
    PackedView half = part.view;
    if (gate_up.size() == 1) half.rows = inner;
    halves.push_back(half);
    half.data += inner / kPanelRows * half.panel_bytes();
    if (gate_up.size() == 1) halves.push_back(half);
  }
  if (halves.size() != 2 || rows != 2 * inner || inner % kGroup != 0 || halves[0].rows != inner) {
    fail("gate and up do not match what comes after them");
  }
  return {halves[0], halves[1]};
}

int Program::add_buffer(int64_t width) {
  if (width < 1 || width >= int64_t{1} << 31) fail("bad width of a buffer");
  if (capacity_ > 0) fail("the program has already run");
  buffers_.push_back({width, nullptr});
  return static_cast<int>(buffers_.size()) - 1;
}

int64_t Program::width(int buffer) const {
  if (buffer < 0 || buffer >= static_cast<int>(buffers_.size())) fail("no such buffer");
  return buffers_[buffer].width;
}

void Program::add_part_step(const char* name, int64_t elements, int64_t groups, PartFn fn) {
  steps_.push_back({name, elements, groups, 0, std::move(fn), nullptr});
}

void Program::add_whole_step(const char* name, int64_t bytes, WholeFn fn) {
  steps_.push_back({name, 0, 0, bytes, nullptr, std::move(fn)});
}

void Program::embed(const MatrixRef& weight, float scale, int out) {
  if (in_tail()) fail("tokens are looked up before rows are selected");
  const int64_t n = weight.view.columns;
  if (n != width(out)) fail("embedding and buffer differ in width");
  if (weight.view.rows < num_ids_) fail("the embedding has fewer rows than there are ids");
  add_row_step("embed", n, [=](const Tile& tile, int64_t row) {
    const int64_t id = tile.ids[row];
    float* to = at(out, row);
    if (weight.packed) {
      unpack_row(weight.view, id, to);
    } else {
      const auto* first = static_cast<const char*>(weight.data);
      widen_row(weight.kind, first + id * weight.stride * float_bytes(weight.kind), n, to);
    }
    if (scale == 1.0f) return;
    for (int64_t i = 0; i < n; ++i) to[i] *= scale;
  });
}

void Program::rms_norm(int x, const float* weight, float eps, int out) {
  const int64_t n = width(x);
  if (width(out) != n) fail("norm and buffer differ in width");
  const auto run = elementwise_kernels().rms_norm;
  add_row_step("norm", n, [=](const Tile&, int64_t row) {
    run(at(x, row), weight, n, eps, at(out, row));
  });
}

void Program::add_rms_norm(int x, int residual, const float* weight, float eps) {
  const int64_t n = width(x);
  if (width(residual) != n || x == residual) fail("norm and residual do not match");
  const auto run = elementwise_kernels().add_rms_norm;
  add_row_step("norm", n, [=](const Tile&, int64_t row) {
    run(at(x, row), at(residual, row), weight, n, eps, at(x, row));
  });
}

void Program::gate_mul(Activation kind, int x, int out) {
  const int64_t n = width(out);
  if (width(x) != 2 * n) fail("gate and up do not match the output");
  const auto run = elementwise_kernels().gate_mul[static_cast<int>(kind)];
  add_part_step("gate", 6 * n, num_groups(n), [=](const Tile&, const Part& part) {
    const int64_t first = part.first_group * kGroup;
    const int64_t count = std::min(part.end_group * kGroup, n) - first;
    for (int64_t row = part.begin; row < part.end; ++row) {
      const float* gate = at(x, row) + first;
      run(gate, gate + n, count, at(out, row) + first);
    }
  });
}

void Program::bias(int x, const float* bias, int64_t n) {
  const auto run = elementwise_kernels().add;
  if (x == kLogits) {
    if (!in_tail()) fail("logits before rows are selected");
    return add_row_step("bias", n, [=](const Tile& tile, int64_t row) {
      run(tile.logits + row * logits_stride_, bias, n);
    });
  }
  if (width(x) != n) fail("bias and buffer differ in width");
  add_row_step("bias", n, [=](const Tile&, int64_t row) { run(at(x, row), bias, n); });
}

Program::Quantized Program::quantized(int64_t columns, bool is_inside) {
  Quantized& slot = quantized_[{columns, in_tail(), is_inside}];
  if (!slot) slot = std::make_shared<std::unique_ptr<Activations>>();
  return slot;
}

Program::Quantized Program::quantize(int x) {
  const int64_t columns = width(x);
  const Quantized slot = quantized(columns, false);
  add_part_step("quantize", 4 * columns, num_groups(columns), [=](const Tile&, const Part& part) {
    const float* first = at(x, part.begin) + part.first_group * kGroup;
    (*slot)->quantize_part(first, columns, part.begin, part.end, part.first_group, part.end_group);
  });
  return slot;
}

void Program::linear(int x, const std::vector<MatrixRef>& parts, int out) {
  const int64_t columns = width(x);
  int64_t rows = 0, bytes = 0;
  bool any_packed = false;
  for (const MatrixRef& part : parts) {
    if (part.view.columns != columns) fail("weight and input differ in columns");
    rows += part.view.rows;
    bytes += part.packed ? part.view.bytes() : part.view.rows * columns * float_bytes(part.kind);
    any_packed |= part.packed;
  }
  if (out == kLogits ? !in_tail() || rows != num_ids_ : rows != width(out) || out == x) {
    fail("weight and output do not match");
  }
  Quantized input;
  if (any_packed) input = quantize(x);
  add_whole_step(out == kLogits ? "head" : "linear", bytes, [=](const Tile& tile) {
    const Activations* quantized = input ? input->get() : nullptr;
    if (input) (*input)->relate_scales();
    float* to = out == kLogits ? tile.logits : at(out);
    const int64_t stride = out == kLogits ? logits_stride_ : rows;
    multiply(parts, quantized, at(x), columns, tile.rows, to, stride);
  });
}

void Program::gated_mlp(int x, const std::vector<MatrixRef>& gate_up, Activation kind,
                        const MatrixRef& down, int out) {
  const int64_t inner = down.view.columns;
  const GatedWeights gated = GatedWeights::of(gate_up, inner);
  if (gated.gate.columns != width(x) || gated.up.columns != width(x)) {
    fail("gate, up and input do not match");
  }
  if (!down.packed || down.view.rows != width(out)) fail("bad end of an MLP");
  const auto combine = elementwise_kernels().gate_mul[static_cast<int>(kind)];
  const Quantized input = quantize(x), hidden = quantized(inner, true);
  add_whole_step("gated", gated.gate.bytes() + gated.up.bytes(), [=](const Tile&) {
    (*input)->relate_scales();
    const GatedJob job{input->get(), gated.gate, gated.up, hidden->get()};
    matmul_gated(&job, 1, combine);
  });
  add_whole_step("linear", down.view.bytes(), [=](const Tile&) {
    const PackedJob job{hidden->get(), down.view, at(out), down.view.rows};
    matmul_packed(&job, 1);
  });
}

void Program::select(int x, int to) {
  if (width(x) != width(to) || x == to) fail("selected rows and buffer do not match");
  if (in_tail() && steps_.size() > tail_begin_) fail("all selects stand together");
  if (steps_.empty()) fail("nothing to select from");
  tail_begin_ = steps_.size();
  selects_.emplace_back(x, to);
}

}  // namespace minisgl
