#pragma once

#include <cstddef>
#include <cstdint>

namespace caudex::kernels {

enum class DType : std::uint8_t { kFloat32, kBFloat16 };

// A bfloat16 is stored as the upper half of a float32.
using bf16 = std::uint16_t;

// static, so that a copy compiled for a newer instruction set can never stand in for another file's.
static inline std::size_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Products run over steps of 4 bytes a column: one float32, or a pair of bfloat16.
static inline int depth_per_step(DType dtype) { return dtype == DType::kFloat32 ? 1 : 2; }

static inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace caudex::kernels
