#include "kernels/four_bit.hpp"

#include <algorithm>
#include <limits>

namespace caudex::kernels {
namespace {

constexpr int kSixteenths = 16;
constexpr int kMostCode = kCodes - 1;
constexpr int kMostEightBit = 127, kMostScale = 255;

// Squared error of a group below which no better one is looked for: 8-bit weights are off by as much.
constexpr int kGoodError = kScaledInputs * 64;

// Steps from a group's least to its largest weight that are tried. Weights that were made of 4 bits may not use them
// all; and to cut off the ends of others costs less than coarse steps do.
constexpr int kSteps[] = {15, 14, 13, 12, 16, 17, 18, 19};

// Places of a group's bytes.
std::size_t group_place(int first_row) { return static_cast<std::size_t>(first_row / kScaledInputs) * kFourBitGroupBytes; }
std::size_t code_place(int column, int input) {
  const int lane = column % (kPanelColumns / 2), word = input % 4 / 2, byte = 1 - input % 2;
  return static_cast<std::size_t>(input / 4) * kFourBitStepBytes + lane * 4 + word * 2 + byte;
}
std::size_t scale_place(int column) {
  return kScaledSteps * kFourBitStepBytes + column % (kPanelColumns / 2) * 4 + column / (kPanelColumns / 2);
}
int code_shift(int column) { return column < kPanelColumns / 2 ? 0 : 4; }

// A scale, the weight that code 0 stands for, and the nearest codes.
struct Candidate {
  FourBitGroup group;
  int error = std::numeric_limits<int>::max();  // squared, in sixteenths
  int bias = 0;                                 // the mean of targets less weights, in whole weights

  Candidate() = default;
  Candidate(const std::int16_t (&targets)[kScaledInputs], int scale, int zero) {
    group.scale = static_cast<std::uint8_t>(scale);
    group.offset = static_cast<std::uint8_t>(zero + kWeightOffset);
    const float inverse = scale == 0 ? 0.0f : 1.0f / static_cast<float>(scale);
    // Weights are rounded down: by half a weight on average.
    const float lowest = static_cast<float>(zero * kSixteenths - kSixteenths / 2);
    std::int16_t codes[kScaledInputs], differences[kScaledInputs];
    for (int i = 0; i < kScaledInputs; ++i) {
      const float code = (static_cast<float>(targets[i]) - lowest) * inverse;
      const float rounded = (code < 0.0f ? 0.0f : code) + 0.5f;
      codes[i] = static_cast<std::int16_t>(rounded < kMostCode ? rounded : static_cast<float>(kMostCode));
    }
    int sum = 0;
    error = 0;
    for (int i = 0; i < kScaledInputs; ++i) {
      const auto weight = static_cast<std::int16_t>((static_cast<std::int16_t>(codes[i] * scale) >> 4) + zero);
      differences[i] = static_cast<std::int16_t>(targets[i] - weight * kSixteenths);
      group.codes[i] = static_cast<std::uint8_t>(codes[i]);
    }
    for (int i = 0; i < kScaledInputs; ++i) {
      sum += differences[i];
      error += differences[i] * differences[i];
    }
    constexpr int kWhole = kScaledInputs * kSixteenths;
    constexpr int kMostBias = 2 * kMostEightBit;
    bias = (sum + kWhole / 2 + kWhole * kMostBias) / kWhole - kMostBias;  // rounded alike on both sides of zero
  }
};

}  // namespace

FourBitGroup FourBitGroup::nearest(const std::int16_t (&targets)[kScaledInputs]) {
  const auto [lowest, highest] = std::minmax_element(targets, targets + kScaledInputs);
  const int low = *lowest, span = *highest - *lowest;
  Candidate best;
  for (const int steps : kSteps) {
    for (int more = 1; more >= -1; --more) {
      const int scale = std::min(kMostScale, std::max(0, (span + steps / 2) / steps + more));
      // Code 0 at the least weight; or, where the codes do not reach as far as the weights, as much above it as the last
      // is below the largest.
      int zero = (2 * low + std::max(0, span - kMostCode * scale) + 2 * kSixteenths - 1) >> 5;
      for (int attempt = 0; attempt < 2; ++attempt) {
        zero = std::max(-kMostEightBit, std::min(kMostEightBit - (kMostCode * scale >> 4), zero));
        const Candidate candidate(targets, scale, zero);
        if (candidate.error < best.error) best = candidate;
        if (candidate.bias == 0) break;
        zero += candidate.bias;
      }
      if (best.error <= kGoodError) return best.group;
    }
  }
  return best.group;
}

void write_group(char* panel, int column, int first_row, const FourBitGroup& group) {
  char* target = panel + group_place(first_row);
  for (int i = 0; i < kScaledInputs; ++i) {
    target[code_place(column, i)] |= static_cast<char>(group.codes[i] << code_shift(column));
  }
  target[scale_place(column)] = static_cast<char>(group.scale);
  target[scale_place(column) + 2] = static_cast<char>(group.offset);
}

FourBitGroup read_group(const char* panel, int column, int first_row) {
  const char* source = panel + group_place(first_row);
  FourBitGroup group;
  group.scale = static_cast<std::uint8_t>(source[scale_place(column)]);
  group.offset = static_cast<std::uint8_t>(source[scale_place(column) + 2]);
  for (int i = 0; i < kScaledInputs; ++i) {
    const auto byte = static_cast<unsigned char>(source[code_place(column, i)]);
    group.codes[i] = byte >> code_shift(column) & (kCodes - 1);
  }
  return group;
}

}  // namespace caudex::kernels
