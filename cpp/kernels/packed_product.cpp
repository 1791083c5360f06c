#include "kernels/packed_product.hpp"

namespace caudex::kernels {
namespace {

constexpr int kConvertedRows = 8;  // an item

}  // namespace

PackedProduct::Operand PackedProduct::left_operand(const MatrixRows& input, const PackedMatrix& matrix) {
  const bool narrow = matrix.dtype() == DType::kBFloat16;
  const bool as_is = !narrow || kernels_.bf16_left_element_size == 2;
  if (as_is && (input.padded || matrix.depth() == matrix.padded_depth())) return {input.data, input.row_bytes};
  const std::size_t row_bytes = static_cast<std::size_t>(matrix.padded_depth()) * kernels_.bf16_left_element_size;
  char* target = converted_.reserve(row_bytes * input.rows);
  threads_.run((input.rows + kConvertedRows - 1) / kConvertedRows, [&](int item, int) {
    const int end = std::min(input.rows, (item + 1) * kConvertedRows);
    for (int row = item * kConvertedRows; row < end; ++row) {
      const bf16* source = reinterpret_cast<const bf16*>(input.data + row * input.row_bytes);
      kernels_.load_left_bf16(target + row * row_bytes, source, matrix.depth(), matrix.padded_depth());
    }
  });
  return {target, row_bytes};
}

}  // namespace caudex::kernels
