#pragma once

#include <cstddef>
#include <cstdint>

namespace caudex::kernels {

// kInt8 is of keys and values only: whole numbers with a scale a row.
enum class DType : std::uint8_t { kFloat32, kBFloat16, kInt8 };

// A bfloat16 is stored as the upper half of a float32.
using bf16 = std::uint16_t;

// static, so that a copy compiled for a newer instruction set can never stand in for another file's.
static inline std::size_t element_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kBFloat16 ? 2 : 1;
}

// Products run over steps of 4 bytes a column: one float32, a pair of bfloat16, or four bytes.
static inline int depth_per_step(DType dtype) { return 4 / static_cast<int>(element_size(dtype)); }

static inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace caudex::kernels
