#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernel_table.hpp"

namespace caudex::kernels {

// 32 inputs' weights of one column in 4 bits; see kernel_table.hpp for what a code stands for.
struct FourBitGroup {
  std::uint8_t scale = 0, offset = kWeightOffset;
  std::uint8_t codes[kScaledInputs] = {};

  // An 8-bit weight, as a byte less its offset: -127 to 127.
  int weight(int input) const { return (codes[input] * scale >> 4) + offset - kWeightOffset; }

  // The scale and offset, among some that come near to `targets` (in sixteenths of an 8-bit weight, at most 127 * 16 in
  // magnitude), whose nearest codes have the least squared error. It is found in whole numbers, so that every processor
  // finds the same.
  static FourBitGroup nearest(const std::int16_t (&targets)[kScaledInputs]);
};

// Where a column's 32 inputs from `first_row` on are in a panel in 4 bits.
void write_group(char* panel, int column, int first_row, const FourBitGroup& group);
FourBitGroup read_group(const char* panel, int column, int first_row);

}  // namespace caudex::kernels
