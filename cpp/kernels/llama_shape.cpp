#include "kernels/llama_shape.hpp"

#include <stdexcept>

namespace caudex::kernels {

LinearPlace place_of(const LlamaShape& shape, const std::string& role) {
  const int hidden = shape.hidden_size, width = shape.intermediate_size;
  const int queries = shape.num_query_heads * shape.head_dim, keys = shape.num_kv_heads * shape.head_dim;
  if (role == "query") return {kQkv, hidden, queries, 0, false};
  if (role == "key") return {kQkv, hidden, keys, queries, false};
  if (role == "value") return {kQkv, hidden, keys, queries + keys, false};
  if (role == "output") return {kOutput, queries, hidden, 0, false};
  if (role == "gate") return {kGateUp, hidden, width, 0, true};
  if (role == "up") return {kGateUp, hidden, width, kPanelColumns / 2, true};
  if (role == "down") return {kDown, width, hidden, 0, false};
  throw std::invalid_argument("unknown linear layer '" + role + "'");
}

void check_layer(const LlamaShape& shape, int layer) {
  if (layer < 0 || layer >= shape.num_layers) refuse("layer", layer, shape.num_layers);
}

void refuse(const std::string& what, int value, int limit) {
  throw std::invalid_argument(what + " " + std::to_string(value) + " is out of range; expected 0 to " +
                              std::to_string(limit - 1));
}

}  // namespace caudex::kernels
