#include "kernels/llama.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace caudex::kernels {
namespace {

constexpr int kNormRows = 16, kHeadRows = 4, kEmbedRows = 16;  // an item
constexpr int kGateColumns = kPanelColumns / 2;

const float* or_null(const std::vector<float>& bias, int column) { return bias.empty() ? nullptr : &bias[column]; }

std::vector<float> padded(const float* values, int count) {
  std::vector<float> result(round_up(count, 16), 0.0f);
  std::copy_n(values, count, result.begin());
  return result;
}

template <class Body>
void for_rows(ThreadPool& threads, int rows, int rows_per_item, const Body& body) {
  threads.run((rows + rows_per_item - 1) / rows_per_item, [&](int item, int) {
    const int end = std::min(rows, (item + 1) * rows_per_item);
    for (int row = item * rows_per_item; row < end; ++row) body(row);
  });
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

void LlamaModel::quantize(int layer) {
  if (layer < 0 || layer >= shape_.num_layers) refuse("layer", layer, shape_.num_layers);
  Layer& at = layers_[layer];
  for (PackedMatrix* matrix : {&at.qkv, &at.output, &at.gate_up, &at.down}) matrix->quantize(arena_, threads_);
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
    for_rows(threads_, columns, kPanelColumns, [&](int column) {
      matrix.set_column(column_of(column), weight + column * row_bytes, 1);
      if (bias) biases[column_of(column)] = bias[column];
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

void LlamaModel::check_step(const std::int32_t* tokens, const Batch& batch, const std::vector<std::int32_t>& adapters,
                            const std::vector<std::int32_t>& logit_rows) const {
  if (!adapters.empty() && adapters.size() != batch.sequences().size()) {
    throw std::invalid_argument(std::to_string(adapters.size()) + " adapters for a batch of " +
                                std::to_string(batch.sequences().size()) + " sequences");
  }
  for (const std::int32_t adapter : adapters) {
    if (adapter >= adapters_.num_adapters()) refuse("adapter", adapter, adapters_.num_adapters());
  }
  for (int row = 0; row < batch.num_rows(); ++row) {
    if (tokens[row] < 0 || tokens[row] >= shape_.vocab_size) refuse("token", tokens[row], shape_.vocab_size);
    if (batch.position(row) >= shape_.max_positions) refuse("position", batch.position(row), shape_.max_positions);
  }
  for (const std::int32_t row : logit_rows) {
    if (row < 0 || row >= batch.num_rows()) refuse("logit row", row, batch.num_rows());
  }
}

void LlamaModel::choose_adapters(const Batch& batch, const std::vector<std::int32_t>& adapters,
                                 const std::vector<std::int32_t>& logit_rows) {
  std::vector<std::int32_t> of_row, of_selected;
  for (std::size_t i = 0; i < adapters.size(); ++i) {
    of_row.insert(of_row.end(), batch.sequences()[i].query_len, adapters[i]);
  }
  if (!of_row.empty()) {
    for (const std::int32_t row : logit_rows) of_selected.push_back(of_row[row]);
  }
  all_.adapted.assign(of_row);
  selected_.adapted.assign(of_selected);
}

void LlamaModel::forward(const std::int32_t* tokens, const Batch& batch, const AttentionPlan& plan,
                         const std::vector<std::int32_t>& adapters, const std::vector<std::int32_t>& logit_rows,
                         float* logits) {
  check_step(tokens, batch, adapters, logit_rows);
  choose_adapters(batch, adapters, logit_rows);
  embed(tokens, batch.num_rows());
  const int last = shape_.num_layers - 1, wanted = static_cast<int>(logit_rows.size());
  for (int i = 0; i < last; ++i) {
    attend(i, batch, plan, true);
    finish_layer(i, all_, batch.num_rows());
  }
  attend(last, batch, plan, wanted > 0);
  if (wanted == 0) return;
  select_rows(logit_rows);
  finish_layer(last, selected_, wanted);
  normalize(selected_, final_norm_, wanted);
  const std::size_t stride = shape_.vocab_size;
  product_.run({selected_.normed.data(), normed_bytes(), wanted, true}, head_,
               [&](int first_row, int rows, int panel, const float* sums) {
                 const int column = panel * kPanelColumns;
                 kernels_.store_f32(logits + first_row * stride + column, stride, sums, or_null(head_bias_, column),
                                    rows, std::min(kPanelColumns, shape_.vocab_size - column));
               });
}

void LlamaModel::embed(const std::int32_t* tokens, int rows) {
  float* residual = reinterpret_cast<float*>(all_.residual.reserve(rows * residual_stride() * sizeof(float)));
  const std::size_t row_bytes = shape_.hidden_size * element_size(shape_.dtype);
  for_rows(threads_, rows, kEmbedRows, [&](int row) {
    float* target = residual + row * residual_stride();
    std::fill(target + shape_.hidden_size, target + residual_stride(), 0.0f);
    if (shape_.tied_embedding) return head_.get_column(tokens[row], target);
    const char* source = embedding_ + tokens[row] * row_bytes;
    if (shape_.dtype == DType::kFloat32) {
      std::memcpy(target, source, row_bytes);
    } else {
      kernels_.widen_bf16(target, reinterpret_cast<const bf16*>(source), shape_.hidden_size);
    }
  });
}

// First half of a layer: from the residual stream to attended heads, keys and values stored on the way.
void LlamaModel::attend(int index, const Batch& batch, const AttentionPlan& plan, bool needs_output) {
  const Layer& layer = layers_[index];
  const int rows = batch.num_rows();
  normalize(all_, layer.attention_norm, rows);
  const std::size_t stride = layer.qkv.padded_columns();
  float* projected = reinterpret_cast<float*>(all_.projected.reserve(rows * stride * sizeof(float)));
  const MatrixRows normed{all_.normed.data(), normed_bytes(), rows, true};
  const LoraDelta delta = adapters_.delta(all_.adapted, index, kQkv, normed);
  product_.run(normed, layer.qkv, [&](int first_row, int count, int panel, float* sums) {
    delta.add_to(sums, first_row, count, panel);
    const int column = panel * kPanelColumns;
    kernels_.store_f32(projected + first_row * stride + column, stride, sums, or_null(layer.qkv_bias, column), count,
                       kPanelColumns);
  });
  if (shape_.dtype == DType::kBFloat16) all_.heads.reserve(rows * stride * sizeof(bf16));
  for_rows(threads_, rows, kHeadRows, [&](int row) { place_heads(index, batch, row); });
  if (!needs_output) return;
  char* attended = all_.attended.reserve(rows * attended_bytes());
  const char* heads = shape_.dtype == DType::kBFloat16 ? all_.heads.data() : all_.projected.data();
  attention_.run(index, {heads, static_cast<std::ptrdiff_t>(stride), shape_.head_dim}, attended, batch, plan,
                 shape_.num_query_heads / shape_.num_kv_heads, shape_.attention_scale);
}

// Norm and rotate a row's queries and keys, round them and the values to the model's type, and store keys and values.
void LlamaModel::place_heads(int index, const Batch& batch, int row) {
  const Layer& layer = layers_[index];
  const std::size_t stride = layer.qkv.padded_columns();
  const std::size_t half = shape_.head_dim / 2;
  float* projected = reinterpret_cast<float*>(all_.projected.data()) + row * stride;
  const float* cos = &cos_[batch.position(row) * half];
  const float* sin = &sin_[batch.position(row) * half];
  for (int head = 0; head < shape_.num_query_heads + shape_.num_kv_heads; ++head) {
    float* at = projected + head * shape_.head_dim;
    if (shape_.normed_heads) {
      normalize_head(at, head < shape_.num_query_heads ? layer.query_norm : layer.key_norm);
    }
    kernels_.rotate(at, cos, sin, shape_.head_dim);
  }
  const char* heads = all_.projected.data();
  if (shape_.dtype == DType::kBFloat16) {
    kernels_.round_to_bf16(reinterpret_cast<bf16*>(all_.heads.data()) + row * stride, projected,
                           static_cast<int>(stride));
    heads = all_.heads.data();
  }
  const std::size_t head_bytes = shape_.head_dim * element_size(shape_.dtype);
  const char* keys = heads + shape_.num_query_heads * head_bytes;
  const auto row_stride = static_cast<std::ptrdiff_t>(stride);
  pool_.write_row(index, batch, row, {keys, row_stride, shape_.head_dim},
                  {keys + shape_.num_kv_heads * head_bytes, row_stride, shape_.head_dim});
}

void LlamaModel::normalize_head(float* head, const std::vector<float>& weight) const {
  alignas(64) float copy[kMaxHeadDim] = {}, normed[kMaxHeadDim];
  std::copy_n(head, shape_.head_dim, copy);
  kernels_.rms_norm_f32(normed, copy, weight.data(), shape_.head_dim, shape_.norm_epsilon);
  std::copy_n(normed, shape_.head_dim, head);
}

void LlamaModel::select_rows(const std::vector<std::int32_t>& rows) {
  const std::size_t residual_bytes = residual_stride() * sizeof(float);
  char* residual = selected_.residual.reserve(rows.size() * residual_bytes);
  char* attended = selected_.attended.reserve(rows.size() * attended_bytes());
  for (const std::int32_t row : rows) {
    std::memcpy(residual, all_.residual.data() + row * residual_bytes, residual_bytes);
    std::memcpy(attended, all_.attended.data() + row * attended_bytes(), attended_bytes());
    residual += residual_bytes;
    attended += attended_bytes();
  }
}

// Second half of a layer: from attended heads through the output projection and the MLP, into the residual stream.
void LlamaModel::finish_layer(int index, Rows& rows, int num_rows) {
  const Layer& layer = layers_[index];
  const MatrixRows attended{rows.attended.data(), attended_bytes(), num_rows};
  add_product(rows, attended, layer.output, layer.output_bias,
              adapters_.delta(rows.adapted, index, kOutput, attended));
  normalize(rows, layer.mlp_norm, num_rows);
  const std::size_t stride = round_up(shape_.intermediate_size, 16);
  char* activated = rows.activated.reserve(num_rows * activated_bytes());
  const MatrixRows normed{rows.normed.data(), normed_bytes(), num_rows, true};
  const LoraDelta delta = adapters_.delta(rows.adapted, index, kGateUp, normed);
  product_.run(normed, layer.gate_up, [&](int first_row, int count, int panel, float* sums) {
    delta.add_to(sums, first_row, count, panel);
    const float* bias = or_null(layer.gate_up_bias, panel * kPanelColumns);
    const std::size_t first = first_row * stride + panel * kGateColumns;
    if (shape_.dtype == DType::kFloat32) {
      float* target = reinterpret_cast<float*>(activated) + first;
      kernels_.swiglu_f32(target, stride, sums, bias, count, kGateColumns);
    } else {
      bf16* target = reinterpret_cast<bf16*>(activated) + first;
      kernels_.swiglu_bf16(target, stride, sums, bias, count, kGateColumns);
    }
  });
  const MatrixRows inputs{activated, activated_bytes(), num_rows, true};
  add_product(rows, inputs, layer.down, layer.down_bias, adapters_.delta(rows.adapted, index, kDown, inputs));
}

void LlamaModel::add_product(Rows& rows, const MatrixRows& input, const PackedMatrix& matrix,
                             const std::vector<float>& bias, const LoraDelta& delta) {
  float* residual = reinterpret_cast<float*>(rows.residual.data());
  product_.run(input, matrix, [&](int first_row, int count, int panel, float* sums) {
    delta.add_to(sums, first_row, count, panel);
    const int column = panel * kPanelColumns;
    kernels_.add_f32(residual + first_row * residual_stride() + column, residual_stride(), sums, or_null(bias, column),
                     count, std::min(kPanelColumns, shape_.hidden_size - column));
  });
}

void LlamaModel::normalize(Rows& rows, const std::vector<float>& weight, int num_rows) {
  char* normed = rows.normed.reserve(num_rows * normed_bytes());
  const float* residual = reinterpret_cast<const float*>(rows.residual.data());
  for_rows(threads_, num_rows, kNormRows, [&](int row) {
    const float* x = residual + row * residual_stride();
    char* target = normed + row * normed_bytes();
    if (shape_.dtype == DType::kFloat32) {
      kernels_.rms_norm_f32(reinterpret_cast<float*>(target), x, weight.data(), shape_.hidden_size,
                            shape_.norm_epsilon);
    } else {
      kernels_.rms_norm_bf16(reinterpret_cast<bf16*>(target), x, weight.data(), shape_.hidden_size,
                             shape_.norm_epsilon);
    }
  });
}

}  // namespace caudex::kernels
