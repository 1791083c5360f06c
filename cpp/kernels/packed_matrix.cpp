#include "kernels/packed_matrix.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

namespace caudex::kernels {

PackedMatrix::PackedMatrix(int num_columns, int depth, DType dtype, Arena& arena)
    : num_columns_(num_columns), depth_(depth), dtype_(dtype) {
  constexpr int kMost = 1 << 24;
  if (num_columns < 1 || depth < 1 || num_columns > kMost || depth > kMost) {
    throw std::invalid_argument("a packed matrix of " + std::to_string(num_columns) + " columns and depth " +
                                std::to_string(depth) + "; expected 1 to " + std::to_string(kMost) + " each");
  }
  num_steps_ = (depth + depth_per_step(dtype) - 1) / depth_per_step(dtype);
  data_ = arena.allocate(num_bytes());
}

std::size_t PackedMatrix::offset(int column, int row) const {
  const int per_step = depth_per_step(dtype_);
  const std::size_t in_panel =
      static_cast<std::size_t>(row / per_step) * kPanelColumns * 4 + column % kPanelColumns * 4;
  return column / kPanelColumns * panel_bytes() + in_panel + row % per_step * element_size(dtype_);
}

void PackedMatrix::set_column(int column, const char* weights, std::ptrdiff_t stride) {
  const std::size_t size = element_size(dtype_);
  for (int row = 0; row < depth_; ++row) {
    std::memcpy(data_ + offset(column, row), weights + row * stride * static_cast<std::ptrdiff_t>(size), size);
  }
}

void PackedMatrix::get_column(int column, float* target) const {
  for (int row = 0; row < depth_; ++row) {
    const char* weight = data_ + offset(column, row);
    if (dtype_ == DType::kFloat32) {
      std::memcpy(target + row, weight, sizeof(float));
    } else {
      bf16 half;
      std::memcpy(&half, weight, sizeof(half));
      const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
      std::memcpy(target + row, &bits, sizeof(bits));
    }
  }
}

}  // namespace caudex::kernels
