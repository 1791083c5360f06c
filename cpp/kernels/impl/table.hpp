// Everything an instruction set's file compiles. Included after one vector header of kernels/simd.
#pragma once

#include "kernels/kernel_table.hpp"

#include "kernels/impl/product.hpp"

#include "kernels/impl/elementwise.hpp"

#include "kernels/impl/attention.hpp"

#include "kernels/impl/panel.hpp"

#include "kernels/impl/layer.hpp"

#include "kernels/impl/quantized.hpp"

#include "kernels/impl/hadamard.hpp"

#include "kernels/impl/quantized_attention.hpp"

#include "kernels/impl/four_bit.hpp"

#if defined(CAUDEX_DECODES_WEIGHTS)
#include "kernels/impl/coded.hpp"
#endif

namespace caudex::kernels {
namespace {

constexpr KernelTable make_table(const char* name) {
  KernelTable table{};
  table.name = name;
  table.bf16_left_element_size = kBf16LeftElementSize;
  table.load_left_bf16 = load_left_bf16;
  table.multiply_panel_f32 = multiply_panel<F32Product>;
  table.multiply_panel_bf16 = multiply_panel<Bf16Product>;
  table.multiply_two_panels_f32 = multiply_two_panels<F32Product>;
  table.multiply_two_panels_bf16 = multiply_two_panels<Bf16Product>;
#if defined(CAUDEX_DECODES_WEIGHTS)
  table.multiply_coded_panel = multiply_coded_panel;
  table.decode_panel = decode_panel;
#endif
  table.quantize_f32 = quantize<float>;
  table.quantize_bf16 = quantize<bf16>;
  table.quantize_row_f32 = quantize_row<float>;
  table.quantize_row_bf16 = quantize_row<bf16>;
  table.quantize_hadamard_f32 = quantize_hadamard<float>;
  table.quantize_hadamard_bf16 = quantize_hadamard<bf16>;
  table.multiply_quantized_panel = multiply_panel<ByteProduct>;
  table.multiply_two_quantized_panels = multiply_two_panels<ByteProduct>;
  table.multiply_four_bit_panel = multiply_four_bit_panel;
  table.store_f32 = store_panel<float>;
  table.store_bf16 = store_panel<bf16>;
  table.add_f32 = add_panel;
  table.swiglu_f32 = swiglu_panel<float>;
  table.swiglu_bf16 = swiglu_panel<bf16>;
  table.rms_norm_f32 = rms_norm<float>;
  table.rms_norm_bf16 = rms_norm<bf16>;
  table.rotate = rotate;
  table.widen_bf16 = widen_bf16;
  table.round_to_bf16 = round_to_bf16;
  table.attend_step_f32 = attend_step<PlainAttention<F32Product>>;
  table.attend_step_bf16 = attend_step<PlainAttention<Bf16Product>>;
  table.attend_step_int8 = attend_step<QuantizedAttention>;
  table.fold_partition = fold_partition;
  table.finish_row_f32 = finish_row<float>;
  table.finish_row_bf16 = finish_row<bf16>;
  return table;
}

}  // namespace
}  // namespace caudex::kernels
