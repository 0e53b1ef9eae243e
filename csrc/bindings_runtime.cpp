// Threads, instruction sets and the two ceilings that benchmarks compare against.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bindings.h"
#include "isa.h"
#include "pool.h"
#include "probe.h"

namespace nb = nanobind;

namespace minisgl {

namespace {

// What an array's __array_struct__ holds: https://numpy.org/doc/stable/reference/arrays.interface.html
struct ArrayInterface {
  int two, nd;
  char kind;
  int itemsize, flags;
  Py_intptr_t *shape, *strides;
  void* data;
  PyObject* descr;
};
constexpr int kContiguous = 1, kAligned = 0x100, kNotSwapped = 0x200;

// Where a contiguous vector of signed integers of `itemsize` bytes lies; 0 for any other array.
// Twenty times as fast as the same look from Python, which a step takes four times.
uintptr_t vector_address(nb::handle array_struct, int itemsize) {
  if (!PyCapsule_IsValid(array_struct.ptr(), nullptr)) throw nb::type_error("not an array's struct");
  const auto& array =
      *static_cast<const ArrayInterface*>(PyCapsule_GetPointer(array_struct.ptr(), nullptr));
  constexpr int kPlain = kContiguous | kAligned | kNotSwapped;
  const bool is_vector = array.two == 2 && array.nd == 1 && (array.flags & kPlain) == kPlain;
  if (!is_vector || array.kind != 'i' || array.itemsize != itemsize) return 0;
  return reinterpret_cast<uintptr_t>(array.data);
}

}  // namespace

void bind_runtime(nb::module_& m) {
  m.def("vector_address", &vector_address);
  m.def("available_isas", [] {
    std::vector<std::string> names;
    for (int i = 0; i < kNumIsas; ++i) {
      const Isa isa = static_cast<Isa>(i);
      if (isa_available(isa)) names.push_back(isa_name(isa));
    }
    return names;
  });
  m.def("isa", [] { return std::string(isa_name(current_isa())); });
  m.def("set_isa", [](const std::string& name) {
    Isa isa;
    if (!isa_from_name(name.c_str(), &isa)) {
      throw std::invalid_argument("unknown instruction set: " + name);
    }
    if (!set_isa(isa)) throw std::invalid_argument("this machine has no " + name);
  });
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", [](int n) {
    if (n < 1 || n > 256) throw std::invalid_argument("the number of threads must be in [1, 256]");
    nb::gil_scoped_release release;
    set_num_threads(n);
  });
  m.def("spin_us", &spin_us);
  m.def("set_spin_us", [](int64_t us) {
    if (us < 0) throw std::invalid_argument("the spin time must not be negative");
    set_spin_us(us);
  });
  m.def("probe_read", [](int64_t bytes, int repeats) {
    nb::gil_scoped_release release;
    return probe_read(bytes, repeats);
  });
  m.def("probe_multiply", [](int64_t steps, int repeats) {
    nb::gil_scoped_release release;
    return probe_multiply(steps, repeats);
  });
}

}  // namespace minisgl
