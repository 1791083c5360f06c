// How the kernels' bindings take their arguments.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/dtype.hpp"

namespace caudex {

// Tensors come as addresses and strides: the Python wrappers have checked their type, device and shape, and passing a
// torch tensor itself costs microseconds a call.
using Address = std::uintptr_t;
using Int32s = nanobind::ndarray<const std::int32_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

inline kernels::DType dtype_named(const std::string& name) {
  if (name == "float32") return kernels::DType::kFloat32;
  if (name == "bfloat16") return kernels::DType::kBFloat16;
  throw std::invalid_argument("dtype is '" + name + "'; expected 'float32' or 'bfloat16'");
}

inline std::vector<std::int32_t> to_vector(const Int32s& array) {
  return {array.data(), array.data() + array.shape(0)};
}

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace caudex
