#include "kernels/packed_product.hpp"

#include <cstring>

namespace caudex::kernels {
namespace {

constexpr int kConvertedRows = 8;  // an item

}  // namespace

PackedProduct::Operand PackedProduct::left_operand(const Team& team, const MatrixRows& input,
                                                   const PackedMatrix& matrix) {
  if (matrix.is_quantized()) return quantized_operand(team, input, matrix);
  const bool narrow = matrix.dtype() == DType::kBFloat16;
  const bool as_is = !narrow || kernels_.bf16_left_element_size == 2;
  if (as_is && (input.padded || matrix.depth() == matrix.padded_depth())) return {input.data, input.row_bytes};
  const std::size_t row_bytes = static_cast<std::size_t>(matrix.padded_depth()) * kernels_.bf16_left_element_size;
  char* target = converted_[team.leader()].reserve(row_bytes * input.rows);
  team.run((input.rows + kConvertedRows - 1) / kConvertedRows, [&](int item, int) {
    const int end = std::min(input.rows, (item + 1) * kConvertedRows);
    for (int row = item * kConvertedRows; row < end; ++row) {
      const bf16* source = reinterpret_cast<const bf16*>(input.data + row * input.row_bytes);
      kernels_.load_left_bf16(target + row * row_bytes, source, matrix.depth(), matrix.padded_depth());
    }
  });
  return {target, row_bytes};
}

PackedProduct::Operand PackedProduct::quantized_operand(const Team& team, const MatrixRows& input,
                                                        const PackedMatrix& matrix) {
  const std::size_t row_bytes = matrix.num_groups() * sizeof(QuantizedGroup);
  char* target = converted_[team.leader()].reserve(row_bytes * input.rows);
  team.run((input.rows + kConvertedRows - 1) / kConvertedRows, [&](int item, int) {
    const int end = std::min(input.rows, (item + 1) * kConvertedRows);
    for (int row = item * kConvertedRows; row < end; ++row) {
      const char* source = input.data + row * input.row_bytes;
      auto* groups = reinterpret_cast<QuantizedGroup*>(target + row * row_bytes);
      if (matrix.dtype() == DType::kFloat32) {
        kernels_.quantize_f32(groups, reinterpret_cast<const float*>(source), matrix.depth());
      } else {
        kernels_.quantize_bf16(groups, reinterpret_cast<const bf16*>(source), matrix.depth());
      }
    }
  });
  return {target, row_bytes};
}

void PackedProduct::multiply(PanelProduct product, const PackedMatrix& matrix, int panel, int panels,
                             AlignedBuffer& plain) const {
  if (matrix.is_quantized()) return multiply_quantized(product, matrix, panel, panels, plain);
  const std::size_t bytes = matrix.panel_bytes();
  // A coded panel may lie right behind a plain one too.
  const auto follows = [&] {
    return !matrix.is_coded(panel + 1) && matrix.panel(panel + 1) == matrix.panel(panel) + bytes;
  };
  if (!matrix.is_coded(panel) && (panels == 1 || follows())) {
    product.panel = matrix.panel(panel);
    return multiply_plain(product, matrix.dtype(), panels);
  }
  char* target = plain.reserve(2 * bytes);
  if (panels == 1) return kernels_.multiply_coded_panel(product, matrix.coded_panel(panel), target);
  for (int p = 0; p < 2; ++p) {
    if (matrix.is_coded(panel + p)) {
      kernels_.decode_panel(target + p * bytes, matrix.coded_panel(panel + p), matrix.num_steps());
    } else {
      std::memcpy(target + p * bytes, matrix.panel(panel + p), bytes);
    }
  }
  product.panel = target;
  multiply_plain(product, matrix.dtype(), 2);
}

void PackedProduct::multiply_quantized(PanelProduct product, const PackedMatrix& matrix, int panel, int panels,
                                       AlignedBuffer& plain) const {
  product.panel = matrix.panel(panel);
  product.scales = matrix.scales(panel);
  if (matrix.bits() == 8) {
    return (panels == 2 ? kernels_.multiply_two_quantized_panels : kernels_.multiply_quantized_panel)(product);
  }
  char* target = plain.reserve(matrix.panel_bytes());
  for (int p = 0; p < panels; ++p, product.sums += product.rows * kPanelColumns) {
    product.panel = matrix.panel(panel + p);
    product.scales = matrix.scales(panel + p);
    kernels_.multiply_four_bit_panel(product, target);
  }
}

void PackedProduct::multiply_plain(const PanelProduct& product, DType dtype, int panels) const {
  if (dtype == DType::kFloat32) {
    (panels == 2 ? kernels_.multiply_two_panels_f32 : kernels_.multiply_panel_f32)(product);
  } else {
    (panels == 2 ? kernels_.multiply_two_panels_bf16 : kernels_.multiply_panel_bf16)(product);
  }
}

}  // namespace caudex::kernels
