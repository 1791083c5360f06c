#include "kernels/llama.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace caudex::kernels {
namespace {

constexpr int kGateColumns = kPanelColumns / 2;

std::vector<float> padded(const float* values, int count) {
  std::vector<float> result(round_up(count, 16), 0.0f);
  std::copy_n(values, count, result.begin());
  return result;
}

}  // namespace

LlamaModel::LlamaModel(const LlamaShape& shape, KvPool& pool, ThreadPool& threads, const KernelTable& kernels)
    : shape_(shape),
      pool_(pool),
      threads_(threads),
      kernels_(kernels),
      product_(kernels, threads),
      attention_(pool, kernels, threads),
      adapters_(shape, threads, kernels),
      scratch_(threads.num_threads()),
      head_(shape.vocab_size, shape.hidden_size, shape.dtype, *plain_head_) {
  const KvLayout& layout = pool.layout();
  if (layout.num_layers != shape.num_layers || layout.num_kv_heads != shape.num_kv_heads ||
      layout.head_dim != shape.head_dim || layout.dtype != shape.dtype) {
    throw std::invalid_argument("the KV pool's layers, KV heads, head dimension or type are not the model's");
  }
  for (int i = 0; i < shape.num_layers; ++i) layers_.push_back(make_layer());
  if (!shape.tied_embedding) {
    embedding_ =
        arena_.allocate(static_cast<std::size_t>(shape.vocab_size) * shape.hidden_size * element_size(shape.dtype));
  }
}

LlamaModel::Layer LlamaModel::make_layer() {
  const LlamaShape& s = shape_;
  const int heads = s.num_query_heads + 2 * s.num_kv_heads;
  auto plain = std::make_unique<Arena>();
  Arena& arena = *plain;
  return {std::move(plain),
          PackedMatrix(heads * s.head_dim, s.hidden_size, s.dtype, arena),
          PackedMatrix(s.hidden_size, s.num_query_heads * s.head_dim, s.dtype, arena),
          PackedMatrix(round_up(s.intermediate_size, kGateColumns) * 2, s.hidden_size, s.dtype, arena),
          PackedMatrix(s.hidden_size, s.intermediate_size, s.dtype, arena),
          {}, {}, {}, {}, {}, {}, {}, {}};
}

void LlamaModel::encode(int layer) {
  if (layer < -1 || layer >= shape_.num_layers) refuse("layer", layer, shape_.num_layers);
  if (!product_.encodes(shape_.dtype)) return;
  if (layer < 0) {
    head_.encode(arena_, threads_);
    plain_head_.reset();
    return;
  }
  Layer& at = layers_[layer];
  for (PackedMatrix* matrix : {&at.qkv, &at.output, &at.gate_up, &at.down}) matrix->encode(arena_, threads_);
  at.plain.reset();
}

void LlamaModel::quantize(int layer, int bits) {
  if (layer < -1 || layer >= shape_.num_layers) refuse("layer", layer, shape_.num_layers);
  if (layer < 0) {
    head_.quantize(bits, arena_, threads_);
    plain_head_.reset();
    return;
  }
  Layer& at = layers_[layer];
  for (PackedMatrix* matrix : {&at.qkv, &at.output, &at.gate_up, &at.down}) matrix->quantize(bits, arena_, threads_);
  at.plain.reset();
}

void LlamaModel::set_linear(const std::string& role, int layer, const char* weight, const float* bias) {
  const LlamaShape& s = shape_;
  if (role == "embedding") {
    const std::size_t size = static_cast<std::size_t>(s.vocab_size) * s.hidden_size * element_size(s.dtype);
    if (!s.tied_embedding) std::memcpy(embedding_, weight, size);
    return;
  }
  const auto take = [&](PackedMatrix& matrix, std::vector<float>& biases, int columns, const auto& column_of) {
    const std::size_t row_bytes = matrix.depth() * element_size(s.dtype);
    if (bias && biases.empty()) biases.resize(matrix.padded_columns(), 0.0f);
    threads_.run((columns + kPanelColumns - 1) / kPanelColumns, [&](int item, int) {
      const int end = std::min(columns, (item + 1) * kPanelColumns);
      for (int column = item * kPanelColumns; column < end; ++column) {
        matrix.set_column(column_of(column), weight + column * row_bytes, 1);
        if (bias) biases[column_of(column)] = bias[column];
      }
    });
  };
  if (role == "head") return take(head_, head_bias_, s.vocab_size, [](int column) { return column; });
  check_layer(s, layer);
  Layer& at = layers_[layer];
  const LinearPlace place = place_of(s, role);
  PackedMatrix* const matrices[] = {&at.qkv, &at.output, &at.gate_up, &at.down};
  std::vector<float>* const biases[] = {&at.qkv_bias, &at.output_bias, &at.gate_up_bias, &at.down_bias};
  take(*matrices[place.matrix], *biases[place.matrix], place.num_outputs,
       [&](int column) { return place.column(column); });
}

void LlamaModel::set_norm(const std::string& role, int layer, const float* weight) {
  if (role == "final") {
    final_norm_ = padded(weight, shape_.hidden_size);
    return;
  }
  check_layer(shape_, layer);
  Layer& at = layers_[layer];
  if (role == "attention") {
    at.attention_norm = padded(weight, shape_.hidden_size);
  } else if (role == "mlp") {
    at.mlp_norm = padded(weight, shape_.hidden_size);
  } else if (role == "query") {
    at.query_norm = padded(weight, shape_.head_dim);
  } else if (role == "key") {
    at.key_norm = padded(weight, shape_.head_dim);
  } else {
    throw std::invalid_argument("unknown norm '" + role + "'");
  }
}

void LlamaModel::set_rotation(const float* cos, const float* sin) {
  const std::size_t count = static_cast<std::size_t>(shape_.max_positions) * (shape_.head_dim / 2);
  cos_.assign(cos, cos + count);
  sin_.assign(sin, sin + count);
}

std::size_t LlamaModel::num_bytes() const {
  std::size_t bytes = head_.num_bytes();
  for (const Layer& layer : layers_) {
    bytes += layer.qkv.num_bytes() + layer.output.num_bytes() + layer.gate_up.num_bytes() + layer.down.num_bytes();
  }
  if (!shape_.tied_embedding) {
    bytes += static_cast<std::size_t>(shape_.vocab_size) * shape_.hidden_size * element_size(shape_.dtype);
  }
  return bytes;
}

}  // namespace caudex::kernels
