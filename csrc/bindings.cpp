// The module minisgl._native.
#include "bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "Native CPU kernels of minisgl; use minisgl.kernel.native.";
  minisgl::bind_runtime(m);
  minisgl::bind_matmul(m);
  minisgl::bind_attention(m);
  minisgl::bind_program(m);
  minisgl::bind_sample(m);
}
