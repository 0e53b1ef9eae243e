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

void bind_runtime(nb::module_& m) {
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
