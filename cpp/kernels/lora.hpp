#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/aligned_buffer.hpp"
#include "kernels/llama_shape.hpp"
#include "kernels/packed_matrix.hpp"
#include "kernels/packed_product.hpp"

namespace caudex::kernels {

// What an adapter adds to a linear layer: scale * up (down x). Matrices are in the model's type.
struct LoraPair {
  std::string role;  // of the linear layer; see place_of
  int rank;
  const char* down;  // [rank][inputs]
  const char* up;    // [outputs][rank]
  float scale;
};

// The rows of a step that adapters change, adapter by adapter.
class LoraRows {
 public:
  struct Group {
    int adapter;
    int first;                       // place of its first row among all groups' rows
    std::vector<std::int32_t> rows;  // ascending
  };

  // `adapters`: of each row; -1 for none.
  void assign(const std::vector<std::int32_t>& adapters);

  const std::vector<Group>& groups() const { return groups_; }
  int num_rows() const { return num_rows_; }

 private:
  std::vector<Group> groups_;
  int num_rows_ = 0;
};

class LoraAdapters;

// What the adapters of some rows add to one product. Cheap to copy; valid until its team makes the next one.
class LoraDelta {
 public:
  // Add it to a panel's sums, [count][32], of `count` rows from `first_row` on. May be called from several threads.
  void add_to(float* sums, int first_row, int count, int panel) const {
    if (rows_.num_rows() > 0) add_groups(sums, first_row, count, panel);
  }

 private:
  friend class LoraAdapters;
  LoraDelta(const LoraAdapters& adapters, const LoraRows& rows, int layer, LayerMatrix matrix)
      : adapters_(adapters), rows_(rows), layer_(layer), matrix_(matrix) {}
  void add_groups(float* sums, int first_row, int count, int panel) const;

  const LoraAdapters& adapters_;
  const LoraRows& rows_;
  int layer_;
  LayerMatrix matrix_;
  char* lowered_ = nullptr;
  std::size_t lowered_row_ = 0;
};

// Low-rank adapters over one model of the Llama family (Hu et al., 2021), several in one step.
//
// A row's inputs go through the adapter's down matrices and its scale in float32, are rounded to the model's type, and
// go through its up matrices into the sums of the base weights, before anything becomes of those. So a row's bits
// depend on its own inputs and adapter alone, and those of a row without an adapter are the base model's.
//
//   one matrix for the down matrices of a product's linear layers, which multiply the same rows:
//     lowered   | query's rank | key's rank | value's rank |     each from an even column on
//   one matrix for each up matrix, of those panels of the product that hold columns of its linear layer
class LoraAdapters {
 public:
  LoraAdapters(const LlamaShape& shape, ThreadPool& threads, const KernelTable& kernels);

  // An adapter that changes nothing yet; the number that rows choose it by.
  int add_adapter();

  // Take what an adapter changes in a layer, once for each layer.
  // Throws std::invalid_argument for an adapter, layer or role that is not there, an empty rank, or a layer set before.
  void set_layer(int adapter, int layer, const std::vector<LoraPair>& pairs);

  // Take the inputs of a layer's product, one for each of the rows that `rows` was made of, through the down matrices of
  // their adapters. Teams that share no thread may do so side by side.
  LoraDelta delta(const Team& team, const LoraRows& rows, int layer, LayerMatrix matrix, const MatrixRows& inputs);

  int num_adapters() const { return static_cast<int>(adapters_.size()); }
  std::size_t num_bytes() const { return num_bytes_; }

 private:
  friend class LoraDelta;
  static constexpr int kItemRows = 64;  // of one panel's product

  struct Up {
    PackedMatrix matrix;
    int first_panel;     // of the base product's
    int lowered_column;  // of its first input
  };
  struct Pairs {
    std::vector<PackedMatrix> down;  // one, or none if the adapter leaves the product alone
    std::vector<float> scales;       // of its columns, padded to whole panels
    std::vector<Up> ups;
  };
  struct Item {
    const LoraRows::Group* group;
    int first, panel;
  };
  struct Lowered {
    std::vector<Item> items;
    AlignedBuffer rows;  // [rows of all groups][padded ranks], as left operands
  };

  const Pairs& pairs(int adapter, int layer, LayerMatrix matrix) const {
    return adapters_[adapter][layer * kLayerMatrices + matrix];
  }
  void set_pairs(Pairs& target, const std::vector<LoraPair>& pairs);
  void lower(const Item& item, const Pairs& pairs, const MatrixRows& inputs, const LoraDelta& delta, int thread);
  void raise(const Up& up, int panel, const char* lowered, std::size_t lowered_row, const std::int32_t* rows,
             int num_rows, float* sums) const;
  void load_left(char* target, const char* source, int count, int padded_count) const;
  void multiply(const PanelProduct& product) const;
  int left_size() const { return shape_.dtype == DType::kFloat32 ? 4 : kernels_.bf16_left_element_size; }

  const LlamaShape shape_;
  const KernelTable& kernels_;
  Arena arena_;
  std::size_t num_bytes_ = 0;
  std::vector<std::vector<Pairs>> adapters_;  // [adapter][layer, matrix]
  std::vector<AlignedBuffer> gathered_;  // a thread's
  std::vector<Lowered> lowered_;         // a team's, by its leader
};

}  // namespace caudex::kernels
