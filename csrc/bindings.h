// Each family of operations has a file bindings_<family>.cpp that defines one of these.
//
// Tensors arrive as addresses: minisgl/kernel/native.py is the only caller and checks type, shape,
// stride and lifetime first. Nothing here links against torch.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace minisgl {

void bind_runtime(nanobind::module_& m);
void bind_matmul(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_program(nanobind::module_& m);
void bind_sample(nanobind::module_& m);

template <class T>
T* address(uint64_t value) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(value));
}

}  // namespace minisgl
