#pragma once

#include <string>

#include "kernels/kernel_table.hpp"

namespace caudex::kernels {

struct LlamaShape {
  int num_layers, hidden_size, intermediate_size, num_query_heads, num_kv_heads, head_dim, vocab_size, max_positions;
  bool normed_heads;    // RMSNorm of each query and key head before it is rotated (Qwen3)
  bool tied_embedding;  // the embedding is the head's weight
  float norm_epsilon;
  float attention_scale;
  DType dtype;
};

// A layer's packed matrices. Linear layers that multiply the same rows share one.
enum LayerMatrix { kQkv, kOutput, kGateUp, kDown, kLayerMatrices };

// Where a linear layer's outputs are among the columns of its packed matrix. Gate and up take turns, 16 columns each,
// so that a panel holds both factors of its 16 activations.
struct LinearPlace {
  LayerMatrix matrix;
  int num_inputs, num_outputs;
  int first_column;
  bool alternates;

  int column(int output) const {
    constexpr int kTurn = kPanelColumns / 2;
    return first_column + (alternates ? output / kTurn * kPanelColumns + output % kTurn : output);
  }
};

// The place of "query", "key", "value", "output", "gate", "up" or "down".
// Throws std::invalid_argument for another role.
LinearPlace place_of(const LlamaShape& shape, const std::string& role);

// Throws std::invalid_argument for a layer that the model does not have.
void check_layer(const LlamaShape& shape, int layer);

// Throws std::invalid_argument: `what` is `value`, where 0 to `limit` - 1 was expected.
[[noreturn]] void refuse(const std::string& what, int value, int limit);

}  // namespace caudex::kernels
