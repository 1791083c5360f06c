// Everything an instruction set's file compiles. Included after one vector header of kernels/simd.
#pragma once

#include "kernels/kernel_table.hpp"

#include "kernels/impl/product.hpp"

#include "kernels/impl/elementwise.hpp"

#include "kernels/impl/attention.hpp"

namespace caudex::kernels {
namespace {

constexpr KernelTable make_table(const char* name) {
  KernelTable table{};
  table.name = name;
  table.bf16_left_element_size = kBf16LeftElementSize;
  table.load_left_bf16 = load_left_bf16;
  table.attend_step_f32 = attend_step<F32Product>;
  table.attend_step_bf16 = attend_step<Bf16Product>;
  table.fold_partition = fold_partition;
  table.finish_row_f32 = finish_row_f32;
  table.finish_row_bf16 = finish_row_bf16;
  return table;
}

}  // namespace
}  // namespace caudex::kernels
