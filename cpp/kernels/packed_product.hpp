#pragma once

#include <algorithm>
#include <vector>

#include "kernels/aligned_buffer.hpp"
#include "kernels/kernel_table.hpp"
#include "kernels/packed_matrix.hpp"
#include "kernels/team.hpp"

namespace caudex::kernels {

// Rows of a matrix in the type of the weights they are multiplied with.
struct MatrixRows {
  const char* data;
  std::size_t row_bytes;  // from one row to the next
  int rows;
  bool padded = false;  // readable, and zero, up to the matrix's padded depth
};

// Products of row batches with packed matrices. Each output has one accumulator and sums its inputs in ascending
// order, so its bits depend on its row and column alone: not on the number of rows, its place, or the threads.
class PackedProduct {
 public:
  PackedProduct(const KernelTable& kernels, ThreadPool& threads)
      : kernels_(kernels),
        threads_(threads),
        sums_(threads.num_threads()),
        plain_(threads.num_threads()),
        converted_(threads.num_threads()) {}
  PackedProduct(const PackedProduct&) = delete;

  // Calls `store(first_row, rows, panel, sums)` for pieces that together cover all rows and panels, from the threads of
  // `team`; sums: [rows][32], which it may change. Teams that share no thread may run products side by side.
  template <class Store>
  void run(const Team& team, const MatrixRows& input, const PackedMatrix& matrix, const Store& store) {
    if (input.rows == 0) return;
    const Operand left = left_operand(team, input, matrix);
    const int row_blocks = (input.rows + kBlockRows - 1) / kBlockRows;
    const int panel_groups = num_panel_groups(team, matrix.num_panels(), row_blocks);
    team.run(row_blocks * panel_groups, [&](int item, int thread) {
      const int first_row = item / panel_groups * kBlockRows, group = item % panel_groups;
      const int rows = std::min(kBlockRows, input.rows - first_row);
      float* sums = reinterpret_cast<float*>(sums_[thread].reserve(2 * kBlockRows * kPanelColumns * sizeof(float)));
      const int end = matrix.num_panels() * (group + 1) / panel_groups;
      for (int panel = matrix.num_panels() * group / panel_groups; panel < end;) {
        const int panels = rows >= kTwoPanelRows && panel + 1 < end ? 2 : 1;
        const PanelProduct product{left.data + first_row * left.row_bytes, left.row_bytes, rows, nullptr,
                                   matrix.num_steps(), sums};
        multiply(product, matrix, panel, panels, plain_[thread]);
        for (int p = 0; p < panels; ++p) store(first_row, rows, panel + p, sums + p * rows * kPanelColumns);
        panel += panels;
      }
    });
  }

  // Whether products with encoded weights of a type can be had, and are quicker.
  bool encodes(DType dtype) const { return dtype == DType::kBFloat16 && kernels_.multiply_coded_panel; }

  const KernelTable& kernels() const { return kernels_; }
  ThreadPool& threads() const { return threads_; }

 private:
  // Rows whose left operands stay in the second-level cache while all panels pass.
  static constexpr int kBlockRows = 192;
  static constexpr int kItemsPerThread = 3;
  // From here up products take longer than the weights' way from memory, and fewer loads pay.
  static constexpr int kTwoPanelRows = 64;

  struct Operand {
    const char* data;
    std::size_t row_bytes;
  };

  static int num_panel_groups(const Team& team, int num_panels, int row_blocks) {
    if (team.num_threads() == 1) return 1;
    const int wanted = (kItemsPerThread * team.num_threads() + row_blocks - 1) / row_blocks;
    return std::max(1, std::min(num_panels, wanted));
  }

  // `panels` (1 or 2) panels from `panel` on; what is coded of them, or in 4 bits, is decoded to `plain`, with few rows on
  // the way.
  void multiply(PanelProduct product, const PackedMatrix& matrix, int panel, int panels, AlignedBuffer& plain) const;
  void multiply_quantized(PanelProduct product, const PackedMatrix& matrix, int panel, int panels,
                          AlignedBuffer& plain) const;
  void multiply_plain(const PanelProduct& product, DType dtype, int panels) const;

  // The rows as they are where the kernels can read them so, else a converted copy.
  Operand left_operand(const Team& team, const MatrixRows& input, const PackedMatrix& matrix);
  Operand quantized_operand(const Team& team, const MatrixRows& input, const PackedMatrix& matrix);

  const KernelTable& kernels_;
  ThreadPool& threads_;
  std::vector<AlignedBuffer> sums_, plain_;  // a thread's
  std::vector<AlignedBuffer> converted_;     // a team's, by its leader
};

}  // namespace caudex::kernels
