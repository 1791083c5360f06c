#include "kernels/packed_matrix.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/four_bit.hpp"

namespace caudex::kernels {
namespace {

constexpr int kStepWeights = 2 * kPanelColumns;  // of bfloat16

// A panel with more than one patch in so many weights is quicker read as it is.
constexpr int kWeightsAPatch = 64;

bf16 weight_at(const char* plain, std::size_t index) {
  bf16 weight;
  std::memcpy(&weight, plain + index * sizeof(bf16), sizeof(bf16));
  return weight;
}

// Where the parts of a step's weight `index` are in a coded panel.
std::size_t lower_place(std::size_t step, std::size_t index) {
  return step / 2 * kCodedPairBytes + step % 2 * kStepWeights + index;
}
std::size_t code_place(std::size_t step, std::size_t index) {
  return step / 2 * kCodedPairBytes + 2 * kStepWeights + step % 2 * kPanelColumns + index % kPanelColumns;
}
int code_shift(std::size_t index) { return index < kPanelColumns ? 0 : 4; }

// Where the weight of a panel's column and row is in a quantized panel.
std::size_t quantized_place(int column, int row) {
  return static_cast<std::size_t>(row / 4) * kPanelColumns * 4 + column % kPanelColumns * 4 + row % 4;
}

// What an 8-bit weight of a column stands for, and what weights are multiplied with to become such; 0 where all are
// zeros. An infinity or a NaN spoils the column's outputs, and no others: the scale is no number then.
struct ColumnScale {
  float scale = 0.0f, inverse = 0.0f;
};

ColumnScale scale_of(const std::vector<float>& weights) {
  float most = 0.0f;
  for (const float weight : weights) {
    if (!std::isfinite(weight)) return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
    most = std::max(most, std::abs(weight));
  }
  if (most < kLeastMagnitude) return {};
  return {most / kMostByte, kMostByte / most};
}

// Write a column's weights, times `inverse`, into a panel in 8 bits.
void write_eight_bits(char* panel, int column, const std::vector<float>& weights, float inverse) {
  for (std::size_t row = 0; row < weights.size(); ++row) {
    panel[quantized_place(column, static_cast<int>(row))] =
        static_cast<char>(std::lrintf(weights[row] * inverse) + kWeightOffset);
  }
}

// Likewise in 4 bits.
void write_four_bits(char* panel, int column, const std::vector<float>& weights, float inverse) {
  const int depth = static_cast<int>(weights.size());
  for (int first = 0; first < depth; first += kScaledInputs) {
    std::int16_t targets[kScaledInputs] = {};
    for (int i = 0, end = std::min(kScaledInputs, depth - first); i < end; ++i) {
      targets[i] = static_cast<std::int16_t>(std::lrintf(weights[first + i] * inverse * 16.0f));
    }
    write_group(panel, column, first, FourBitGroup::nearest(targets));
  }
}

// A panel of zeros, to be written into.
void write_zeros(char* panel, int bits, int steps) {
  if (bits == 8) {
    std::memset(panel, kWeightOffset, static_cast<std::size_t>(steps) * kPanelColumns * 4);
    return;
  }
  for (int row = 0; row < steps * 4; row += kScaledInputs) {
    for (int column = 0; column < kPanelColumns; ++column) write_group(panel, column, row, FourBitGroup());
  }
}

}  // namespace

PackedMatrix::PackedMatrix(int num_columns, int depth, DType dtype, Arena& arena)
    : num_columns_(num_columns), depth_(depth), dtype_(dtype) {
  constexpr int kMost = 1 << 24;
  if (num_columns < 1 || depth < 1 || num_columns > kMost || depth > kMost) {
    throw std::invalid_argument("a packed matrix of " + std::to_string(num_columns) + " columns and depth " +
                                std::to_string(depth) + "; expected 1 to " + std::to_string(kMost) + " each");
  }
  num_steps_ = (depth + depth_per_step(dtype) - 1) / depth_per_step(dtype);
  num_bytes_ = panel_bytes() * num_panels();
  char* data = arena.allocate(num_bytes_);
  for (int panel = 0; panel < num_panels(); ++panel) panels_.push_back({data + panel * panel_bytes()});
}

std::size_t PackedMatrix::offset(int column, int row) const {
  const int per_step = depth_per_step(dtype_);
  return static_cast<std::size_t>(row / per_step) * kPanelColumns * 4 + column % kPanelColumns * 4 +
         row % per_step * element_size(dtype_);
}

void PackedMatrix::set_column(int column, const char* weights, std::ptrdiff_t stride) {
  const std::size_t size = element_size(dtype_);
  char* panel = panels_[column / kPanelColumns].data;
  for (int row = 0; row < depth_; ++row) {
    std::memcpy(panel + offset(column, row), weights + row * stride * static_cast<std::ptrdiff_t>(size), size);
  }
}

void PackedMatrix::encode(Arena& arena, ThreadPool& threads) {
  choose_upper_bytes(threads);
  std::vector<std::vector<WeightPatch>> patches(panels_.size());
  threads.run(num_panels(), [&](int panel, int) { patches[panel] = find_patches(panels_[panel].data); });
  std::vector<const char*> plain(panels_.size());
  num_bytes_ = 0;
  for (int i = 0; i < num_panels(); ++i) {
    Panel& panel = panels_[i];
    panel.coded = static_cast<int>(patches[i].size()) <= num_steps_ * kStepWeights / kWeightsAPatch;
    if (panel.coded) {
      panel.first_patch = static_cast<int>(patches_.size());
      panel.num_patches = static_cast<int>(patches[i].size());
      patches_.insert(patches_.end(), patches[i].begin(), patches[i].end());
    }
    const std::size_t bytes = panel.coded ? coded_panel_bytes() : panel_bytes();
    plain[i] = std::exchange(panel.data, arena.allocate(bytes));
    num_bytes_ += bytes + panel.num_patches * sizeof(WeightPatch);
  }
  patches_.shrink_to_fit();
  threads.run(num_panels(), [&](int panel, int) {
    if (panels_[panel].coded) {
      encode_panel(panels_[panel].data, plain[panel]);
    } else {
      std::memcpy(panels_[panel].data, plain[panel], panel_bytes());
    }
  });
}

// The 16 that most weights have.
void PackedMatrix::choose_upper_bytes(ThreadPool& threads) {
  std::vector<std::array<std::int64_t, 256>> counts(threads.num_threads());
  threads.run(num_panels(), [&](int panel, int thread) {
    for (int place = 0; place < num_steps_ * kStepWeights; ++place) {
      ++counts[thread][weight_at(panels_[panel].data, place) >> 8];
    }
  });
  std::array<std::int64_t, 256> total{};
  for (const auto& count : counts) std::transform(count.begin(), count.end(), total.begin(), total.begin(), std::plus<>());
  std::array<int, 256> order;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return total[a] > total[b]; });
  codes_.fill(-1);
  for (int code = 0; code < kUpperBytes; ++code) {
    upper_bytes_[code] = static_cast<char>(order[code]);
    codes_[order[code]] = static_cast<std::int8_t>(code);
  }
}

// The weights of a plain panel that have no code.
std::vector<WeightPatch> PackedMatrix::find_patches(const char* plain) const {
  std::vector<WeightPatch> patches;
  for (int place = 0; place < num_steps_ * kStepWeights; ++place) {
    const bf16 weight = weight_at(plain, place);
    if (codes_[weight >> 8] < 0) patches.push_back({static_cast<std::uint32_t>(place), weight});
  }
  return patches;
}

void PackedMatrix::encode_panel(char* target, const char* plain) const {
  for (int step = 0; step < num_steps_; ++step) {
    for (int index = 0; index < kStepWeights; ++index) {
      const bf16 weight = weight_at(plain, static_cast<std::size_t>(step) * kStepWeights + index);
      const int code = std::max<int>(codes_[weight >> 8], 0);
      target[lower_place(step, index)] = static_cast<char>(weight & 0xff);
      target[code_place(step, index)] |= static_cast<char>(code << code_shift(index));
    }
  }
}

bf16 PackedMatrix::coded_weight(const Panel& panel, std::size_t offset) const {
  const std::size_t place = offset / sizeof(bf16), step = place / kStepWeights, index = place % kStepWeights;
  const auto first = patches_.begin() + panel.first_patch;
  const auto found = std::lower_bound(first, first + panel.num_patches, place,
                                      [](const WeightPatch& patch, std::size_t at) { return patch.place < at; });
  if (found != first + panel.num_patches && found->place == place) return found->weight;
  const int code = panel.data[code_place(step, index)] >> code_shift(index) & 0xf;
  const auto byte = [](char value) { return static_cast<int>(static_cast<unsigned char>(value)); };
  return static_cast<bf16>(byte(upper_bytes_[code]) << 8 | byte(panel.data[lower_place(step, index)]));
}

void PackedMatrix::quantize(int bits, Arena& arena, ThreadPool& threads) {
  if (bits != 8 && bits != 4) throw std::invalid_argument("weights of " + std::to_string(bits) + " bits; expected 8 or 4");
  const int steps = (depth_ + kGroupInputs - 1) / kGroupInputs * kGroupSteps;
  const std::size_t bytes = bits == 8 ? static_cast<std::size_t>(steps) * kPanelColumns * 4
                                      : static_cast<std::size_t>(steps / kScaledSteps) * kFourBitGroupBytes;
  char* data = arena.allocate(bytes * num_panels());
  std::vector<float> scales(padded_columns());
  threads.run(num_panels(), [&](int panel, int) {
    char* target = data + panel * bytes;
    write_zeros(target, bits, steps);
    std::vector<float> weights(depth_);
    const int end = std::min(num_columns_, (panel + 1) * kPanelColumns);
    for (int column = panel * kPanelColumns; column < end; ++column) {
      get_column(column, weights.data());
      const auto [scale, inverse] = scale_of(weights);
      scales[column] = scale;
      if (inverse > 0.0f) (bits == 8 ? write_eight_bits : write_four_bits)(target, column % kPanelColumns, weights, inverse);
    }
  });
  for (int panel = 0; panel < num_panels(); ++panel) panels_[panel].data = data + panel * bytes;
  scales_ = std::move(scales);
  bits_ = bits;
  num_steps_ = steps;
  num_bytes_ = bytes * num_panels() + scales_.size() * sizeof(float);
}

void PackedMatrix::get_column(int column, float* target) const {
  if (is_quantized()) return get_quantized_column(column, target);
  const Panel& panel = panels_[column / kPanelColumns];
  for (int row = 0; row < depth_; ++row) {
    const std::size_t at = offset(column, row);
    if (dtype_ == DType::kFloat32) {
      std::memcpy(target + row, panel.data + at, sizeof(float));
    } else {
      const bf16 weight = panel.coded ? coded_weight(panel, at) : weight_at(panel.data + at, 0);
      const std::uint32_t bits = static_cast<std::uint32_t>(weight) << 16;
      std::memcpy(target + row, &bits, sizeof(bits));
    }
  }
}

void PackedMatrix::get_quantized_column(int column, float* target) const {
  const char* panel = panels_[column / kPanelColumns].data;
  FourBitGroup group;
  for (int row = 0; row < depth_; ++row) {
    if (bits_ == 4 && row % kScaledInputs == 0) group = read_group(panel, column % kPanelColumns, row);
    const int weight = bits_ == 4 ? group.weight(row % kScaledInputs)
                                  : static_cast<unsigned char>(panel[quantized_place(column, row)]) - kWeightOffset;
    target[row] = static_cast<float>(weight) * scales_[column];
  }
}

}  // namespace caudex::kernels
