// Block ids and tokens on their way to numpy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace caudex {

using BlockArray = nanobind::ndarray<nanobind::numpy, std::int32_t, nanobind::ndim<1>>;

// Without a copy: the array owns the vector.
inline BlockArray to_numpy(std::vector<std::int32_t> values) {
  auto* owned = new std::vector<std::int32_t>(std::move(values));
  nanobind::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<std::int32_t>*>(p); });
  return BlockArray(owned->data(), {owned->size()}, owner);
}

}  // namespace caudex
