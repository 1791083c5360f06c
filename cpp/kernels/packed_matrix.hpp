#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "kernels/kernel_table.hpp"
#include "kernels/memory.hpp"
#include "kernels/thread_pool.hpp"

namespace caudex::kernels {

// A weight matrix packed for products with few or many rows on the left:
//
//   [columns / 32][steps][32 columns][depth]      step: 1 float32, or a pair of bfloat16, of each of 32 columns
//
// A panel of 32 columns is read from end to end, 128 bytes a step. Columns and depth are padded with zeros.
//
// Once all its weights are set, a bfloat16 matrix can be encoded in 12 bits a weight (see kernel_table.hpp): with few
// rows a product takes as long as reading the weights does. Panels that would need many patches, such as those of unused
// vocabulary, stay as they are.
//
// Or any matrix can be quantized to 8 or 4 bits a weight, with loss, for products with quantized rows; see
// kernel_table.hpp for the panels. Its depth is padded to whole groups then.
class PackedMatrix {
 public:
  // `num_columns` outputs, each a sum over `depth` inputs. All weights are zero until set. They live in `arena`, which
  // must outlive the matrix.
  // Throws std::invalid_argument for an empty or oversized matrix.
  PackedMatrix(int num_columns, int depth, DType dtype, Arena& arena);

  // Take a column's `depth` weights from `weights`, `stride` elements apart.
  void set_column(int column, const char* weights, std::ptrdiff_t stride);

  // Move the weights to `arena`, encoded. The arena they came from may be freed then; no more weights can be set.
  void encode(Arena& arena, ThreadPool& threads);

  // Move the weights to `arena`, quantized, likewise. `bits`: 8 or 4; throws std::invalid_argument for others.
  void quantize(int bits, Arena& arena, ThreadPool& threads);

  // Write a column's weights as float32, as far as they have been kept.
  void get_column(int column, float* target) const;

  int num_columns() const { return num_columns_; }
  int depth() const { return depth_; }
  DType dtype() const { return dtype_; }
  int num_steps() const { return num_steps_; }
  int num_panels() const { return padded_columns() / kPanelColumns; }
  int padded_columns() const { return round_up(num_columns_, kPanelColumns); }
  int padded_depth() const { return num_steps_ * depth_per_step(dtype_); }  // unless quantized
  std::size_t panel_bytes() const { return static_cast<std::size_t>(num_steps_) * kPanelColumns * 4; }
  std::size_t num_bytes() const { return num_bytes_; }
  bool is_quantized() const { return bits_ != 0; }
  int bits() const { return bits_; }  // of a weight, if it is quantized
  int num_groups() const { return num_steps_ / kGroupSteps; }
  // Of the panel's columns and those of the panels after it, of a quantized matrix.
  const float* scales(int panel) const { return &scales_[panel * kPanelColumns]; }
  bool is_coded(int panel) const { return panels_[panel].coded; }
  const char* panel(int panel) const { return panels_[panel].data; }
  CodedPanel coded_panel(int panel) const {
    const Panel& at = panels_[panel];
    return {at.data, upper_bytes_.data(), patches_.data() + at.first_patch, at.num_patches};
  }

 private:
  struct Panel {
    char* data;
    bool coded = false;
    int first_patch = 0, num_patches = 0;
  };

  std::size_t offset(int column, int row) const;  // within a plain panel
  std::size_t coded_panel_bytes() const { return static_cast<std::size_t>((num_steps_ + 1) / 2) * kCodedPairBytes; }
  void choose_upper_bytes(ThreadPool& threads);
  std::vector<WeightPatch> find_patches(const char* plain) const;
  void encode_panel(char* target, const char* plain) const;
  bf16 coded_weight(const Panel& panel, std::size_t offset) const;
  void get_quantized_column(int column, float* target) const;

  int num_columns_, depth_, num_steps_, bits_ = 0;
  DType dtype_;
  std::size_t num_bytes_;
  std::vector<Panel> panels_;
  std::array<char, kUpperBytes> upper_bytes_{};
  std::array<std::int8_t, 256> codes_{};  // by upper byte; -1: none
  std::vector<WeightPatch> patches_;
  std::vector<float> scales_;  // [padded columns] of a quantized matrix, else empty
};

}  // namespace caudex::kernels
