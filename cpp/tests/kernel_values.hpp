// Random operands of the kernels' two types, and what they are in double.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "kernels/dtype.hpp"

namespace caudex::test {

// Rows of numbers as the kernels take them, exactly as long as they are, so that a sanitizer sees a read past the end.
class Values {
 public:
  Values(kernels::DType dtype, std::size_t count)
      : dtype_(dtype), bytes_(count * kernels::element_size(dtype)) {}

  // The upper half of `value`'s bits for bfloat16.
  void set(std::size_t index, float value) {
    const char* bits = reinterpret_cast<const char*>(&value);
    const std::size_t size = kernels::element_size(dtype_);
    std::uint32_t word;
    std::memcpy(&word, bits, sizeof(word));
    const auto upper = static_cast<kernels::bf16>(word >> 16);
    std::memcpy(bytes_.data() + index * size, size == 4 ? bits : reinterpret_cast<const char*>(&upper), size);
  }

  float operator[](std::size_t index) const {
    const std::size_t size = kernels::element_size(dtype_);
    std::uint32_t word = 0;
    std::memcpy(&word, bytes_.data() + index * size, size);
    if (size == 2) word <<= 16;
    float value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
  }

  char* at(std::size_t index) { return bytes_.data() + index * kernels::element_size(dtype_); }
  const char* at(std::size_t index) const { return bytes_.data() + index * kernels::element_size(dtype_); }

 private:
  kernels::DType dtype_;
  std::vector<char> bytes_;
};

}  // namespace caudex::test
