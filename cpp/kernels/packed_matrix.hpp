#pragma once

#include <cstddef>

#include "kernels/kernel_table.hpp"
#include "kernels/memory.hpp"

namespace caudex::kernels {

// A weight matrix packed for products with few or many rows on the left:
//
//   [columns / 32][steps][32 columns][depth]      step: 1 float32, or a pair of bfloat16, of each of 32 columns
//
// A panel of 32 columns is read from end to end, 128 bytes a step. Columns and depth are padded with zeros.
class PackedMatrix {
 public:
  // `num_columns` outputs, each a sum over `depth` inputs. All weights are zero until set. They live in `arena`, which
  // must outlive the matrix.
  // Throws std::invalid_argument for an empty or oversized matrix.
  PackedMatrix(int num_columns, int depth, DType dtype, Arena& arena);

  // Take a column's `depth` weights from `weights`, `stride` elements apart.
  void set_column(int column, const char* weights, std::ptrdiff_t stride);

  // Write a column's weights as float32.
  void get_column(int column, float* target) const;

  int num_columns() const { return num_columns_; }
  int depth() const { return depth_; }
  DType dtype() const { return dtype_; }
  int num_steps() const { return num_steps_; }
  int num_panels() const { return padded_columns() / kPanelColumns; }
  int padded_columns() const { return round_up(num_columns_, kPanelColumns); }
  int padded_depth() const { return num_steps_ * depth_per_step(dtype_); }
  std::size_t panel_bytes() const { return static_cast<std::size_t>(num_steps_) * kPanelColumns * 4; }
  std::size_t num_bytes() const { return panel_bytes() * num_panels(); }
  const char* panel(int panel) const { return data_ + panel * panel_bytes(); }

 private:
  std::size_t offset(int column, int row) const;

  int num_columns_, depth_, num_steps_;
  DType dtype_;
  char* data_;
};

}  // namespace caudex::kernels
