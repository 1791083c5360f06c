#include "kernels/lora.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace caudex::kernels {

void LoraRows::assign(const std::vector<std::int32_t>& adapters) {
  groups_.clear();
  num_rows_ = 0;
  for (std::size_t row = 0; row < adapters.size(); ++row) {
    if (adapters[row] < 0) continue;
    const auto same = [&](const Group& group) { return group.adapter == adapters[row]; };
    auto group = std::find_if(groups_.begin(), groups_.end(), same);
    if (group == groups_.end()) group = groups_.insert(group, {adapters[row], 0, {}});
    group->rows.push_back(static_cast<std::int32_t>(row));
  }
  for (Group& group : groups_) {
    group.first = num_rows_;
    num_rows_ += static_cast<int>(group.rows.size());
  }
}

LoraAdapters::LoraAdapters(const LlamaShape& shape, ThreadPool& threads, const KernelTable& kernels)
    : shape_(shape), kernels_(kernels), gathered_(threads.num_threads()), lowered_(threads.num_threads()) {}

int LoraAdapters::add_adapter() {
  adapters_.emplace_back(static_cast<std::size_t>(shape_.num_layers) * kLayerMatrices);
  return num_adapters() - 1;
}

void LoraAdapters::set_layer(int adapter, int layer, const std::vector<LoraPair>& pairs) {
  if (adapter < 0 || adapter >= num_adapters()) refuse("adapter", adapter, num_adapters());
  check_layer(shape_, layer);
  std::array<std::vector<LoraPair>, kLayerMatrices> of_matrix;
  for (const LoraPair& pair : pairs) {
    if (pair.rank < 1) throw std::invalid_argument(pair.role + " has rank " + std::to_string(pair.rank));
    of_matrix[place_of(shape_, pair.role).matrix].push_back(pair);
  }
  for (int matrix = 0; matrix < kLayerMatrices; ++matrix) {
    Pairs& target = adapters_[adapter][layer * kLayerMatrices + matrix];
    if (!target.down.empty()) throw std::invalid_argument("layer " + std::to_string(layer) + " has been set before");
    if (!of_matrix[matrix].empty()) set_pairs(target, of_matrix[matrix]);
  }
}

void LoraAdapters::set_pairs(Pairs& target, const std::vector<LoraPair>& pairs) {
  int columns = 0;
  for (const LoraPair& pair : pairs) columns += round_up(pair.rank, 2);
  const int num_inputs = place_of(shape_, pairs[0].role).num_inputs;
  const std::size_t size = element_size(shape_.dtype);
  PackedMatrix& down = target.down.emplace_back(columns, num_inputs, shape_.dtype, arena_);
  target.scales.resize(down.padded_columns());
  num_bytes_ += down.num_bytes();
  int first = 0;
  for (const LoraPair& pair : pairs) {
    const LinearPlace place = place_of(shape_, pair.role);
    for (int i = 0; i < pair.rank; ++i) down.set_column(first + i, pair.down + i * num_inputs * size, 1);
    std::fill_n(&target.scales[first], pair.rank, pair.scale);
    const int first_panel = place.first_column / kPanelColumns, skipped = first_panel * kPanelColumns;
    PackedMatrix up(place.column(place.num_outputs - 1) + 1 - skipped, pair.rank, shape_.dtype, arena_);
    for (int i = 0; i < place.num_outputs; ++i) {
      up.set_column(place.column(i) - skipped, pair.up + i * pair.rank * size, 1);
    }
    num_bytes_ += up.num_bytes();
    target.ups.push_back({std::move(up), first_panel, first});
    first += round_up(pair.rank, 2);
  }
}

LoraDelta LoraAdapters::delta(const Team& team, const LoraRows& rows, int layer, LayerMatrix matrix,
                              const MatrixRows& inputs) {
  LoraDelta delta(*this, rows, layer, matrix);
  if (rows.groups().empty()) return delta;
  std::vector<Item>& items = lowered_[team.leader()].items;
  items.clear();
  int columns = 0;
  for (const LoraRows::Group& group : rows.groups()) {
    for (const PackedMatrix& down : pairs(group.adapter, layer, matrix).down) {
      columns = std::max(columns, down.padded_columns());
      for (int first = 0; first < static_cast<int>(group.rows.size()); first += kItemRows) {
        for (int panel = 0; panel < down.num_panels(); ++panel) items.push_back({&group, first, panel});
      }
    }
  }
  delta.lowered_row_ = static_cast<std::size_t>(columns) * left_size();
  delta.lowered_ = lowered_[team.leader()].rows.reserve(delta.lowered_row_ * rows.num_rows());
  team.run(static_cast<int>(items.size()), [&](int i, int thread) {
    lower(items[i], pairs(items[i].group->adapter, layer, matrix), inputs, delta, thread);
  });
  return delta;
}

// Some rows' inputs through one panel of their adapter's down matrices.
void LoraAdapters::lower(const Item& item, const Pairs& pairs, const MatrixRows& inputs, const LoraDelta& delta,
                         int thread) {
  const PackedMatrix& down = pairs.down[0];
  const std::int32_t* chosen = &item.group->rows[item.first];
  const int rows = std::min(kItemRows, static_cast<int>(item.group->rows.size()) - item.first);
  const std::size_t left_row = static_cast<std::size_t>(down.padded_depth()) * left_size();
  char* left = gathered_[thread].reserve(left_row * rows);
  for (int i = 0; i < rows; ++i) {
    load_left(left + i * left_row, inputs.data + chosen[i] * inputs.row_bytes, down.depth(), down.padded_depth());
  }
  alignas(64) float sums[kItemRows * kPanelColumns];
  multiply({left, left_row, rows, down.panel(item.panel), down.num_steps(), sums});
  const float* scales = &pairs.scales[item.panel * kPanelColumns];
  for (int i = 0; i < rows; ++i) {
    for (int c = 0; c < kPanelColumns; ++c) sums[i * kPanelColumns + c] *= scales[c];
  }
  alignas(64) bf16 rounded[kItemRows * kPanelColumns];
  const bool narrow = shape_.dtype == DType::kBFloat16;
  if (narrow) kernels_.round_to_bf16(rounded, sums, rows * kPanelColumns);
  const char* values = narrow ? reinterpret_cast<const char*>(rounded) : reinterpret_cast<const char*>(sums);
  const std::size_t place = static_cast<std::size_t>(item.panel) * kPanelColumns * left_size();
  for (int i = 0; i < rows; ++i) {
    load_left(delta.lowered_ + (item.group->first + item.first + i) * delta.lowered_row_ + place,
              values + i * kPanelColumns * element_size(shape_.dtype), kPanelColumns, kPanelColumns);
  }
}

// Rows' lowered inputs through one panel of an up matrix, added to those rows of `sums`.
void LoraAdapters::raise(const Up& up, int panel, const char* lowered, std::size_t lowered_row,
                         const std::int32_t* rows, int num_rows, float* sums) const {
  constexpr int kRows = 16;
  alignas(64) float added[kRows * kPanelColumns];
  const char* columns = up.matrix.panel(panel - up.first_panel);
  lowered += up.lowered_column * left_size();
  for (int done = 0; done < num_rows; done += kRows) {
    const int count = std::min(kRows, num_rows - done);
    multiply({lowered + done * lowered_row, lowered_row, count, columns, up.matrix.num_steps(), added});
    for (int i = 0; i < count; ++i) {
      float* target = sums + rows[done + i] * kPanelColumns;
      for (int c = 0; c < kPanelColumns; ++c) target[c] += added[i * kPanelColumns + c];
    }
  }
}

void LoraAdapters::load_left(char* target, const char* source, int count, int padded_count) const {
  if (shape_.dtype == DType::kBFloat16) {
    kernels_.load_left_bf16(target, reinterpret_cast<const bf16*>(source), count, padded_count);
  } else {
    std::memcpy(target, source, count * sizeof(float));
  }
}

void LoraAdapters::multiply(const PanelProduct& product) const {
  (shape_.dtype == DType::kFloat32 ? kernels_.multiply_panel_f32 : kernels_.multiply_panel_bf16)(product);
}

void LoraDelta::add_groups(float* sums, int first_row, int count, int panel) const {
  for (const LoraRows::Group& group : rows_.groups()) {
    const auto begin = group.rows.begin(), end = group.rows.end();
    const auto first = std::lower_bound(begin, end, first_row), last = std::lower_bound(first, end, first_row + count);
    if (first == last) continue;
    const char* lowered = lowered_ + (group.first + (first - begin)) * lowered_row_;
    for (const LoraAdapters::Up& up : adapters_.pairs(group.adapter, layer_, matrix_).ups) {
      if (panel < up.first_panel || panel >= up.first_panel + up.matrix.num_panels()) continue;
      adapters_.raise(up, panel, lowered, lowered_row_, &*first, static_cast<int>(last - first),
                      sums - first_row * kPanelColumns);
    }
  }
}

}  // namespace caudex::kernels
