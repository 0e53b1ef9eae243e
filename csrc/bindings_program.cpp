// Row operations one by one, and programs of them. minisgl/kernel/native_ops.py and program.py are
// the only callers and check tensors first; sizes are checked again here where a wrong one would
// read past the end.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "bindings.h"
#include "elementwise.h"
#include "program.h"

namespace nb = nanobind;

namespace minisgl {
namespace {

[[noreturn]] void fail(const char* what) { throw std::invalid_argument(what); }

void rms_norm(uint64_t x, int64_t x_stride, uint64_t weight, float eps, int64_t rows, int64_t n,
              uint64_t out, int64_t out_stride) {
  nb::gil_scoped_release release;
  const auto run = elementwise_kernels().rms_norm;
  for_rows(rows, n, [&](int64_t row) {
    run(address<float>(x) + row * x_stride, address<float>(weight), n, eps,
        address<float>(out) + row * out_stride);
  });
}

void add_rms_norm(uint64_t x, uint64_t residual, uint64_t weight, float eps, int64_t rows,
                  int64_t n) {
  nb::gil_scoped_release release;
  const auto run = elementwise_kernels().add_rms_norm;
  for_rows(rows, n, [&](int64_t row) {
    float* at = address<float>(x) + row * n;
    run(at, address<float>(residual) + row * n, address<float>(weight), n, eps, at);
  });
}

Activation activation(int kind) {
  if (kind < 0 || kind >= kNumActivations) fail("no such activation");
  return static_cast<Activation>(kind);
}

void gate_mul(int kind, uint64_t x, int64_t rows, int64_t n, uint64_t out) {
  const auto run = elementwise_kernels().gate_mul[static_cast<int>(activation(kind))];
  nb::gil_scoped_release release;
  for_rows(rows, 4 * n, [&](int64_t row) {
    const float* gate = address<float>(x) + row * 2 * n;
    run(gate, gate + n, n, address<float>(out) + row * n);
  });
}

void add_bias(uint64_t x, uint64_t bias, int64_t rows, int64_t n) {
  nb::gil_scoped_release release;
  const auto run = elementwise_kernels().add;
  for_rows(rows, n, [&](int64_t row) {
    run(address<float>(x) + row * n, address<float>(bias), n);
  });
}

void arg_max(uint64_t x, int64_t rows, int64_t n, int64_t stride, uint64_t values,
             uint64_t indices) {
  nb::gil_scoped_release release;
  const auto run = elementwise_kernels().arg_max;
  for_rows(rows, n, [&](int64_t row) {
    const ArgMax best = run(address<float>(x) + row * stride, n);
    address<float>(values)[row] = best.value;
    address<int64_t>(indices)[row] = best.index;
  });
}

void softmax_stats(uint64_t x, uint64_t inverse_temperature, int64_t rows, int64_t n,
                   int64_t stride, uint64_t out) {
  nb::gil_scoped_release release;
  const auto run = elementwise_kernels().softmax_stats;
  for_rows(rows, 4 * n, [&](int64_t row) {
    const float inverse = address<float>(inverse_temperature)[row];
    const SoftmaxStats stats = run(address<float>(x) + row * stride, n, inverse);
    address<float>(out)[2 * row] = stats.max;
    address<float>(out)[2 * row + 1] = stats.sum;
  });
}

void candidates(uint64_t x, int64_t rows, int64_t n, int64_t stride, int64_t k, uint64_t values,
                uint64_t indices, uint64_t counts) {
  nb::gil_scoped_release release;
  for_rows(rows, 2 * n, [&](int64_t row) {
    address<int32_t>(counts)[row] = static_cast<int32_t>(
        top_candidates(address<float>(x) + row * stride, n, k, address<float>(values) + row * k,
                       address<int32_t>(indices) + row * k));
  });
}

void penalize(uint64_t logits, int64_t n, float repetition, float frequency, float presence,
              uint64_t counts, uint64_t seen) {
  nb::gil_scoped_release release;
  apply_penalties(address<float>(logits), n,
                  {repetition, frequency, presence, address<int32_t>(counts),
                   address<uint8_t>(seen)});
}

// (is packed, format or kind of float, address, rows, columns, stride)
using MatrixTuple = std::tuple<bool, int, uint64_t, int64_t, int64_t, int64_t>;

MatrixRef matrix(const MatrixTuple& tuple) {
  constexpr int64_t kMaxDim = int64_t{1} << 31;
  const auto [packed, kind, data, rows, columns, stride] = tuple;
  if (rows < 1 || columns < 1 || rows >= kMaxDim || columns >= kMaxDim) fail("bad shape");
  if (kind < 0 || kind >= (packed ? kNumFormats : kNumFloatKinds)) fail("no such format");
  if (data == 0 || (!packed && stride < columns)) fail("bad matrix");
  MatrixRef ref{packed, {packed ? static_cast<Format>(kind) : Format::kQ4, rows, columns, nullptr},
                packed ? FloatKind::kFloat32 : static_cast<FloatKind>(kind), address<void>(data),
                stride};
  if (packed) ref.view.data = address<uint8_t>(data);
  return ref;
}

std::vector<MatrixRef> matrices(const std::vector<MatrixTuple>& tuples) {
  std::vector<MatrixRef> refs;
  for (const MatrixTuple& tuple : tuples) refs.push_back(matrix(tuple));
  return refs;
}

// Of each expert: gate and up, and down.
using ExpertTuple = std::tuple<std::vector<MatrixTuple>, std::vector<MatrixTuple>>;

std::vector<ExpertMatrices> experts(const std::vector<ExpertTuple>& tuples) {
  std::vector<ExpertMatrices> found;
  for (const auto& [gate_up, down] : tuples) found.push_back({matrices(gate_up), matrices(down)});
  return found;
}

void route_rows(uint64_t logits, int64_t rows, int64_t n, int64_t top_k, bool renormalize,
                uint64_t experts, uint64_t weights) {
  if (n < 1 || top_k < 1 || top_k > n) fail("bad number of experts");
  nb::gil_scoped_release release;
  for (int64_t row = 0; row < rows; ++row) {
    route(address<float>(logits) + row * n, n, top_k, renormalize,
          address<int32_t>(experts) + row * top_k, address<float>(weights) + row * top_k);
  }
}

// What an attention step takes, in groups: see AttentionParams.
using Heads = std::tuple<int64_t, int64_t, int64_t, float, int64_t>;
using Pool = std::tuple<int, uint64_t, uint64_t, int64_t, uint64_t, uint64_t>;
using Tables = std::tuple<uint64_t, uint64_t, int64_t>;
using Norms = std::tuple<uint64_t, uint64_t, float>;

// requests: (number, query_start, kv_len, rows, row stride). wanted: 0 for the last row of each.
void run(Program& program, int64_t num_tokens, uint64_t ids, uint64_t positions, uint64_t out_loc,
         const std::tuple<int64_t, uint64_t, uint64_t, uint64_t, int64_t>& requests,
         int64_t num_wanted, uint64_t wanted, uint64_t logits, int64_t logits_stride) {
  nb::gil_scoped_release release;
  const auto [num_reqs, query_start, kv_len, rows, row_stride] = requests;
  std::vector<int64_t> last;
  if (wanted == 0 && num_wanted == num_reqs) {
    for (int64_t r = 1; r <= num_reqs; ++r) last.push_back(address<int32_t>(query_start)[r] - 1);
  } else if (wanted == 0 && num_wanted > 0) {
    fail("the last row of each request means as many as there are requests");
  }
  program.run({num_tokens,
               address<int32_t>(ids),
               address<int32_t>(positions),
               address<int32_t>(out_loc),
               {num_reqs, address<int32_t>(query_start), address<int32_t>(kv_len),
                address<int32_t>(rows), row_stride},
               num_wanted,
               wanted == 0 ? last.data() : address<int64_t>(wanted),
               address<float>(logits),
               logits_stride});
}

nb::list take_profile(Program& program) {
  nb::list result;
  for (const StepTime& time : program.take_profile()) {
    result.append(nb::make_tuple(time.name, time.nanoseconds, time.bytes));
  }
  return result;
}

}  // namespace

void bind_program(nb::module_& m) {
  m.def("rms_norm", &rms_norm);
  m.def("add_rms_norm", &add_rms_norm);
  m.def("gate_mul", &gate_mul);
  m.def("add_bias", &add_bias);
  m.def("arg_max", &arg_max);
  m.def("softmax_stats", &softmax_stats);
  m.def("candidates", &candidates);
  m.def("penalize", &penalize);
  m.def("route", &route_rows);
  nb::class_<Program>(m, "Program")
      .def(nb::init<int64_t, int64_t, int64_t, int64_t>())
      .def_prop_ro("num_steps", &Program::num_steps)
      .def("add_buffer", &Program::add_buffer)
      .def("embed", [](Program& p, const MatrixTuple& weight, float scale, int out) {
        p.embed(matrix(weight), scale, out);
      })
      .def("rms_norm", [](Program& p, int x, uint64_t weight, float eps, int out) {
        p.rms_norm(x, address<float>(weight), eps, out);
      })
      .def("add_rms_norm", [](Program& p, int x, int residual, uint64_t weight, float eps) {
        p.add_rms_norm(x, residual, address<float>(weight), eps);
      })
      .def("gate_mul", [](Program& p, int kind, int x, int out) {
        p.gate_mul(activation(kind), x, out);
      })
      .def("bias", [](Program& p, int x, uint64_t bias, int64_t n) {
        p.bias(x, address<float>(bias), n);
      })
      .def("linear", [](Program& p, int x, const std::vector<MatrixTuple>& parts, int out) {
        p.linear(x, matrices(parts), out);
      })
      .def("gated_mlp", [](Program& p, int x, const std::vector<MatrixTuple>& gate_up, int kind,
                           const MatrixTuple& down, int out) {
        p.gated_mlp(x, matrices(gate_up), activation(kind), matrix(down), out);
      })
      .def("experts",
           [](Program& p, int x, int gating, const std::vector<ExpertTuple>& tuples, int kind,
              int64_t top_k, bool renormalize, int out) {
             p.experts(x, gating, experts(tuples), activation(kind), top_k, renormalize, out);
           })
      .def("attention",
           [](Program& p, int qkv, int out, const Heads& heads, const Pool& pool,
              const Tables& tables, const Norms& norms) {
             const auto [num_q, num_kv, dim, scale, window] = heads;
             const auto [kind, k, v, token_stride, k_scale, v_scale] = pool;
             const auto [cos, sin, half] = tables;
             const auto [q_norm, k_norm, eps] = norms;
             if (kind < 0 || kind >= kNumKvKinds) fail("no such kind of keys and values");
             p.attention(qkv, out,
                         {{num_q, num_kv, dim, scale, window},
                          {static_cast<KvKind>(kind), address<void>(k), address<void>(v),
                           token_stride, address<float>(k_scale), address<float>(v_scale)},
                          address<float>(cos), address<float>(sin), half, address<float>(q_norm),
                          address<float>(k_norm), eps});
           })
      .def("select", &Program::select)
      .def("run", &run)
      .def("set_profile", &Program::set_profile)
      .def("take_profile", &take_profile);
}

}  // namespace minisgl
