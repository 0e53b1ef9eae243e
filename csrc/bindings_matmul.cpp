// Packed weights, quantised activations and their products.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "activations.h"
#include "arena.h"
#include "bindings.h"
#include "matmul.h"
#include "pack.h"

namespace nb = nanobind;

namespace minisgl {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 31;  // products of two stay below 2^63

[[noreturn]] void fail(const char* what) { throw std::invalid_argument(what); }

// Owns the memory of a packed weight.
class PackedMatrix {
 public:
  PackedMatrix(int format, int64_t rows, int64_t columns) {
    if (format < 0 || format >= kNumFormats) fail("no such format");
    if (rows < 1 || columns < 1 || rows >= kMaxDim || columns >= kMaxDim) fail("bad shape");
    view_ = {static_cast<Format>(format), rows, columns, nullptr};
    memory_ = weight_memory(view_.bytes());
    view_.data = memory_.get();
  }
  PackedMatrix(const PackedMatrix&) = delete;
  PackedMatrix& operator=(const PackedMatrix&) = delete;

  const PackedView& view() const { return view_; }

 private:
  PackedView view_;
  std::shared_ptr<uint8_t> memory_;
};

// parts: tuples (address, bytes, heads) of matrices that lie on top of each other. With heads, the
// file has rows 0, n/2, 1, n/2 + 1, ... of each head's n; they are packed in order.
PackedMatrix* packed_from_gguf(nb::list parts, int type_id, int64_t rows, int64_t columns) {
  const GgufType* type = gguf_type(type_id);
  if (type == nullptr) fail("this GGUF type cannot be packed");
  if (rows < 1 || columns < 1 || rows >= kMaxDim || columns >= kMaxDim) fail("bad shape");
  if (columns % type->columns != 0) fail("columns are not whole source blocks");
  const int64_t row_bytes = columns / type->columns * type->bytes;
  std::vector<const uint8_t*> source;
  for (nb::handle item : parts) {
    const auto [start, size, heads] = nb::cast<std::tuple<uint64_t, int64_t, int64_t>>(item);
    const int64_t count = size / row_bytes;
    if (size < 0 || size % row_bytes != 0 || count > rows - static_cast<int64_t>(source.size())) {
      fail("the data do not have the size that the shape asks for");
    }
    if (heads < 0 || heads > count || (heads > 0 && count % (2 * heads) != 0)) {
      fail("the rows do not divide into heads");
    }
    const int64_t per_head = heads > 0 ? count / heads : 1, half = per_head / 2;
    for (int64_t row = 0; row < count; ++row) {
      const int64_t i = row % per_head;
      const int64_t stored = heads > 0 ? row - i + i % half * 2 + i / half : row;
      source.push_back(address<uint8_t>(start) + stored * row_bytes);
    }
  }
  if (static_cast<int64_t>(source.size()) != rows) {
    fail("the data do not have the size that the shape asks for");
  }
  nb::gil_scoped_release release;
  auto* result = new PackedMatrix(static_cast<int>(type->format), rows, columns);
  pack_gguf(*type, source.data(), result->view());
  return result;
}

PackedMatrix* packed_from_float(uint64_t source, int kind, int64_t stride, int format,
                                int64_t rows, int64_t columns) {
  if (kind < 0 || kind >= kNumFloatKinds) fail("no such kind of float");
  if (format != static_cast<int>(Format::kQ4m) && format != static_cast<int>(Format::kQ8)) {
    fail("floats can be packed to q4m or q8 only");
  }
  nb::gil_scoped_release release;
  auto* result = new PackedMatrix(format, rows, columns);
  pack_float(static_cast<FloatKind>(kind), address<void>(source), stride, result->view());
  return result;
}

Activations* quantize(uint64_t x, int64_t tokens, int64_t columns, int64_t stride) {
  if (tokens < 0 || columns < 1 || tokens >= kMaxDim || columns >= kMaxDim) fail("bad shape");
  nb::gil_scoped_release release;
  auto* result = new Activations(tokens, columns);
  result->quantize(address<float>(x), stride);
  return result;
}

void multiply(const PackedMatrix& weight, const Activations& x, uint64_t out, int64_t stride) {
  if (x.columns() != weight.view().columns) fail("activations and weight differ in columns");
  if (stride < weight.view().rows && x.tokens() > 1) fail("output rows overlap");
  nb::gil_scoped_release release;
  const PackedJob job{&x, weight.view(), address<float>(out), stride};
  matmul_packed(&job, 1);
}

// jobs: a tuple of (weight, output address, output stride).
void multiply_many(const Activations& x, nb::tuple jobs) {
  constexpr size_t kMax = 64;
  PackedJob list[kMax];
  const size_t count = jobs.size();
  if (count > kMax) fail("too many weights in one product");
  for (size_t i = 0; i < count; ++i) {
    nb::tuple job = nb::cast<nb::tuple>(jobs[i]);
    const auto& weight = nb::cast<const PackedMatrix&>(job[0]);
    if (x.columns() != weight.view().columns) fail("activations and weight differ in columns");
    const int64_t stride = nb::cast<int64_t>(job[2]);
    if (stride < weight.view().rows && x.tokens() > 1) fail("output rows overlap");
    list[i] = {&x, weight.view(), address<float>(nb::cast<uint64_t>(job[1])), stride};
  }
  nb::gil_scoped_release release;
  matmul_packed(list, static_cast<int64_t>(count));
}

// Quantises and multiplies in one call.
void linear(const PackedMatrix& weight, uint64_t x, int64_t tokens, int64_t x_stride, uint64_t out,
            int64_t out_stride) {
  if (tokens < 0 || tokens >= kMaxDim) fail("bad shape");
  if (out_stride < weight.view().rows && tokens > 1) fail("output rows overlap");
  nb::gil_scoped_release release;
  Activations quantized(tokens, weight.view().columns);
  quantized.quantize(address<float>(x), x_stride);
  const PackedJob job{&quantized, weight.view(), address<float>(out), out_stride};
  matmul_packed(&job, 1);
}

// ids: `count` int64 row numbers, each checked here.
void gather_rows(const PackedMatrix& weight, uint64_t ids, int64_t count, uint64_t out) {
  const PackedView& view = weight.view();
  const int64_t* row = address<int64_t>(ids);
  for (int64_t i = 0; i < count; ++i) {
    if (row[i] < 0 || row[i] >= view.rows) throw std::out_of_range("row id out of range");
  }
  nb::gil_scoped_release release;
  float* to = address<float>(out);
  for (int64_t i = 0; i < count; ++i) unpack_row(view, row[i], to + i * view.columns);
}

void float_product(int kind, uint64_t weight, int64_t weight_stride, uint64_t x, int64_t x_stride,
                   uint64_t out, int64_t out_stride, int64_t rows, int64_t tokens,
                   int64_t columns) {
  if (kind < 0 || kind >= kNumFloatKinds) fail("no such kind of float");
  if (rows < 0 || tokens < 0 || columns < 0) fail("bad shape");
  if (out_stride < rows && tokens > 1) fail("output rows overlap");
  nb::gil_scoped_release release;
  const FloatTask task{address<void>(weight), weight_stride, address<float>(x), x_stride,
                       address<float>(out),   out_stride,    rows,              tokens, columns};
  matmul_float(static_cast<FloatKind>(kind), task);
}

}  // namespace

void bind_matmul(nb::module_& m) {
  nb::class_<PackedMatrix>(m, "PackedMatrix")
      .def_prop_ro("rows", [](const PackedMatrix& p) { return p.view().rows; })
      .def_prop_ro("columns", [](const PackedMatrix& p) { return p.view().columns; })
      .def_prop_ro("nbytes", [](const PackedMatrix& p) { return p.view().bytes(); })
      .def_prop_ro("address", [](const PackedMatrix& p) {
        return reinterpret_cast<uintptr_t>(p.view().data);
      })
      .def_prop_ro("format", [](const PackedMatrix& p) {
        return std::string(info(p.view().format).name);
      });
  nb::class_<Activations>(m, "Activations")
      .def_prop_ro("tokens", &Activations::tokens)
      .def_prop_ro("columns", &Activations::columns);
  m.def("packed_from_gguf", &packed_from_gguf, nb::rv_policy::take_ownership);
  m.def("packed_from_float", &packed_from_float, nb::rv_policy::take_ownership);
  m.def("quantize", &quantize, nb::rv_policy::take_ownership);
  m.def("multiply", &multiply);
  m.def("multiply_many", &multiply_many);
  m.def("linear", &linear);
  m.def("gather_rows", &gather_rows);
  m.def("float_product", &float_product);
}

}  // namespace minisgl
