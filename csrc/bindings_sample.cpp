// Choosing tokens. minisgl/kernel/native_ops.py is the only caller and checks the logits first.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bindings.h"
#include "elementwise.h"
#include "sample.h"

namespace nb = nanobind;

namespace minisgl {
namespace {

// (temperature, top_k, top_p, min_p, uniform)
using DrawTuple = std::tuple<double, int64_t, double, double, double>;

// A token for each row; no draws: all are greedy.
std::vector<int32_t> choose_tokens(uint64_t logits, int64_t rows, int64_t n, int64_t stride,
                                   const std::vector<DrawTuple>& draws) {
  if (n < 1 || (!draws.empty() && static_cast<int64_t>(draws.size()) != rows)) {
    throw std::invalid_argument("a draw for each row of logits, or none");
  }
  std::vector<int32_t> tokens(rows);
  nb::gil_scoped_release release;
  for_rows(rows, draws.empty() ? n : 4 * n, [&](int64_t row) {
    Draw draw;
    if (!draws.empty()) {
      const auto& [temperature, top_k, top_p, min_p, uniform] = draws[row];
      draw = {temperature, top_k, top_p, min_p, uniform};
    }
    tokens[row] = choose_token(address<float>(logits) + row * stride, n, draw);
  });
  return tokens;
}

}  // namespace

void bind_sample(nb::module_& m) { m.def("choose_tokens", &choose_tokens); }

}  // namespace minisgl
