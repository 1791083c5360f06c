// A forward pass: see llama.hpp.
#include "kernels/llama.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace caudex::kernels {
namespace {

constexpr int kNormRows = 16, kHeadRows = 4, kEmbedRows = 16;  // an item

// Rows of a block that one thread takes through a layer: so few that what becomes of them stays in its second-level cache,
// and so many that the weights' way there is short beside the products.
constexpr int kBlockRows = 132, kLeastBlockRows = 48;
// Rows that a product's inner loop takes at a time.
constexpr int kRowUnit = 6;
constexpr int kGateColumns = kPanelColumns / 2;

const float* or_null(const std::vector<float>& bias, int column) { return bias.empty() ? nullptr : &bias[column]; }

template <class Body>
void for_rows(const Team& team, int rows, int rows_per_item, const Body& body) {
  team.run((rows + rows_per_item - 1) / rows_per_item, [&](int item, int) {
    const int end = std::min(rows, (item + 1) * rows_per_item);
    for (int row = item * rows_per_item; row < end; ++row) body(row);
  });
}

}  // namespace

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

// Room for the rows of a step and of its logits, and how they are cut into blocks.
void LlamaModel::prepare(const Batch& batch, const std::vector<std::int32_t>& adapters,
                         const std::vector<std::int32_t>& logit_rows) {
  std::vector<std::int32_t> of_row, of_selected;
  for (std::size_t i = 0; i < adapters.size(); ++i) {
    of_row.insert(of_row.end(), batch.sequences()[i].query_len, adapters[i]);
  }
  if (!of_row.empty()) {
    for (const std::int32_t row : logit_rows) of_selected.push_back(of_row[row]);
  }
  cut(all_, batch.num_rows(), of_row);
  cut(selected_, static_cast<int>(logit_rows.size()), of_selected);
  all_.heads.reserve(batch.num_rows() * heads_stride() * element_size(shape_.dtype));
}

// `adapters`: of each row, or none.
void LlamaModel::cut(Rows& rows, int num_rows, const std::vector<std::int32_t>& adapters) const {
  const int threads = threads_.num_threads();
  const int num_blocks =
      num_rows < threads * kLeastBlockRows ? 1 : round_up((num_rows + kBlockRows - 1) / kBlockRows, threads);
  const int units = (num_rows + kRowUnit - 1) / kRowUnit;
  const auto start = [&](int block) { return std::min(num_rows, units * block / num_blocks * kRowUnit); };
  rows.blocks.resize(num_blocks);
  for (int b = 0; b < num_blocks; ++b) {
    Block& block = rows.blocks[b];
    block.first_row = start(b);
    block.num_rows = start(b + 1) - block.first_row;
    std::vector<std::int32_t> of_block;
    if (!adapters.empty()) of_block.assign(adapters.begin() + start(b), adapters.begin() + start(b + 1));
    block.adapted.assign(of_block);
  }
  rows.residual.reserve(num_rows * residual_stride() * sizeof(float));
  rows.attended.reserve(num_rows * attended_bytes());
}

template <class Body>
void LlamaModel::for_blocks(const Rows& rows, const Body& body) {
  if (rows.blocks.size() == 1) return body(Team::all(threads_), rows.blocks[0]);
  threads_.run(static_cast<int>(rows.blocks.size()),
               [&](int block, int thread) { body(Team::alone(thread), rows.blocks[block]); });
}

void LlamaModel::forward(const std::int32_t* tokens, const Batch& batch, const AttentionPlan& plan,
                         const std::vector<std::int32_t>& adapters, const std::vector<std::int32_t>& logit_rows,
                         float* logits) {
  check_step(tokens, batch, adapters, logit_rows);
  prepare(batch, adapters, logit_rows);
  for_blocks(all_, [&](const Team& team, const Block& block) {
    embed(team, block, tokens);
    begin_layer(team, block, 0, batch);
  });
  const int last = shape_.num_layers - 1;
  for (int i = 0; i < last; ++i) {
    attend(i, batch, plan);
    for_blocks(all_, [&](const Team& team, const Block& block) {
      finish_layer(team, all_, block, i);
      begin_layer(team, block, i + 1, batch);
    });
  }
  if (logit_rows.empty()) return;
  attend(last, batch, plan);
  select_rows(logit_rows);
  for_blocks(selected_, [&](const Team& team, const Block& block) {
    finish_layer(team, selected_, block, last);
    multiply_head(team, block, logits);
  });
}

void LlamaModel::embed(const Team& team, const Block& block, const std::int32_t* tokens) {
  const std::size_t row_bytes = shape_.hidden_size * element_size(shape_.dtype);
  for_rows(team, block.num_rows, kEmbedRows, [&](int row) {
    const std::int32_t token = tokens[block.first_row + row];
    float* target = residual(all_, block.first_row + row);
    std::fill(target + shape_.hidden_size, target + residual_stride(), 0.0f);
    if (shape_.tied_embedding) return head_.get_column(token, target);
    const char* source = embedding_ + token * row_bytes;
    if (shape_.dtype == DType::kFloat32) {
      std::memcpy(target, source, row_bytes);
    } else {
      kernels_.widen_bf16(target, reinterpret_cast<const bf16*>(source), shape_.hidden_size);
    }
  });
}

// First part of a layer: from the residual stream to queries, and to keys and values in the pool.
void LlamaModel::begin_layer(const Team& team, const Block& block, int index, const Batch& batch) {
  const Layer& layer = layers_[index];
  const MatrixRows normed = normalize(team, all_, block, layer.attention_norm);
  const std::size_t stride = heads_stride();
  float* projected =
      shape_.dtype == DType::kFloat32
          ? reinterpret_cast<float*>(all_.heads.data()) + block.first_row * stride
          : reinterpret_cast<float*>(
                scratch_[team.leader()].projected.reserve(block.num_rows * stride * sizeof(float)));
  const LoraDelta delta = adapters_.delta(team, block.adapted, index, kQkv, normed);
  product_.run(team, normed, layer.qkv, [&](int first_row, int count, int panel, float* sums) {
    delta.add_to(sums, first_row, count, panel);
    const int column = panel * kPanelColumns;
    kernels_.store_f32(projected + first_row * stride + column, stride, sums, or_null(layer.qkv_bias, column), count,
                       kPanelColumns);
  });
  for_rows(team, block.num_rows, kHeadRows,
           [&](int row) { place_heads(index, batch, block.first_row + row, projected + row * stride); });
}

// Norm and rotate a row's queries and keys, round them and the values to the model's type, and store keys and values.
void LlamaModel::place_heads(int index, const Batch& batch, int row, float* projected) {
  const Layer& layer = layers_[index];
  const std::size_t stride = heads_stride();
  const std::size_t half = shape_.head_dim / 2;
  const float* cos = &cos_[batch.position(row) * half];
  const float* sin = &sin_[batch.position(row) * half];
  for (int head = 0; head < shape_.num_query_heads + shape_.num_kv_heads; ++head) {
    float* at = projected + head * shape_.head_dim;
    if (shape_.normed_heads) {
      normalize_head(at, head < shape_.num_query_heads ? layer.query_norm : layer.key_norm);
    }
    kernels_.rotate(at, cos, sin, shape_.head_dim);
  }
  if (shape_.dtype == DType::kBFloat16) {
    kernels_.round_to_bf16(reinterpret_cast<bf16*>(all_.heads.data()) + row * stride, projected,
                           static_cast<int>(stride));
  }
  const std::size_t head_bytes = shape_.head_dim * element_size(shape_.dtype);
  const char* keys = all_.heads.data() + shape_.num_query_heads * head_bytes;
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

void LlamaModel::attend(int index, const Batch& batch, const AttentionPlan& plan) {
  attention_.run(index, {all_.heads.data(), static_cast<std::ptrdiff_t>(heads_stride()), shape_.head_dim},
                 all_.attended.data(), batch, plan, shape_.num_query_heads / shape_.num_kv_heads,
                 shape_.attention_scale);
}

void LlamaModel::select_rows(const std::vector<std::int32_t>& rows) {
  char* attended = selected_.attended.data();
  for (std::size_t i = 0; i < rows.size(); ++i, attended += attended_bytes()) {
    std::copy_n(residual(all_, rows[i]), residual_stride(), residual(selected_, static_cast<int>(i)));
    std::memcpy(attended, all_.attended.data() + rows[i] * attended_bytes(), attended_bytes());
  }
}

// Last part of a layer: from attended heads through the output projection and the MLP, into the residual stream.
void LlamaModel::finish_layer(const Team& team, Rows& rows, const Block& block, int index) {
  const Layer& layer = layers_[index];
  const MatrixRows attended{rows.attended.data() + block.first_row * attended_bytes(), attended_bytes(),
                            block.num_rows};
  add_product(team, rows, block, attended, layer.output, layer.output_bias,
              adapters_.delta(team, block.adapted, index, kOutput, attended));
  const MatrixRows normed = normalize(team, rows, block, layer.mlp_norm);
  const MatrixRows activated = activate(team, block, index, normed);
  add_product(team, rows, block, activated, layer.down, layer.down_bias,
              adapters_.delta(team, block.adapted, index, kDown, activated));
}

void LlamaModel::multiply_head(const Team& team, const Block& block, float* logits) {
  const std::size_t stride = shape_.vocab_size;
  logits += block.first_row * stride;
  product_.run(team, normalize(team, selected_, block, final_norm_), head_,
               [&](int first_row, int rows, int panel, const float* sums) {
                 const int column = panel * kPanelColumns;
                 kernels_.store_f32(logits + first_row * stride + column, stride, sums, or_null(head_bias_, column),
                                    rows, std::min(kPanelColumns, shape_.vocab_size - column));
               });
}

MatrixRows LlamaModel::normalize(const Team& team, Rows& rows, const Block& block, const std::vector<float>& weight) {
  char* normed = scratch_[team.leader()].normed.reserve(block.num_rows * normed_bytes());
  for_rows(team, block.num_rows, kNormRows, [&](int row) {
    const float* x = residual(rows, block.first_row + row);
    char* target = normed + row * normed_bytes();
    if (shape_.dtype == DType::kFloat32) {
      kernels_.rms_norm_f32(reinterpret_cast<float*>(target), x, weight.data(), shape_.hidden_size,
                            shape_.norm_epsilon);
    } else {
      kernels_.rms_norm_bf16(reinterpret_cast<bf16*>(target), x, weight.data(), shape_.hidden_size,
                             shape_.norm_epsilon);
    }
  });
  return {normed, normed_bytes(), block.num_rows, true};
}

// The activations between the products of the MLP.
MatrixRows LlamaModel::activate(const Team& team, const Block& block, int index, const MatrixRows& normed) {
  const Layer& layer = layers_[index];
  const std::size_t stride = activated_bytes() / element_size(shape_.dtype);
  char* activated = scratch_[team.leader()].activated.reserve(block.num_rows * activated_bytes());
  const LoraDelta delta = adapters_.delta(team, block.adapted, index, kGateUp, normed);
  product_.run(team, normed, layer.gate_up, [&](int first_row, int count, int panel, float* sums) {
    delta.add_to(sums, first_row, count, panel);
    const float* bias = or_null(layer.gate_up_bias, panel * kPanelColumns);
    const std::size_t first = first_row * stride + panel * kGateColumns;
    if (shape_.dtype == DType::kFloat32) {
      kernels_.swiglu_f32(reinterpret_cast<float*>(activated) + first, stride, sums, bias, count, kGateColumns);
    } else {
      kernels_.swiglu_bf16(reinterpret_cast<bf16*>(activated) + first, stride, sums, bias, count, kGateColumns);
    }
  });
  return {activated, activated_bytes(), block.num_rows, true};
}

void LlamaModel::add_product(const Team& team, Rows& rows, const Block& block, const MatrixRows& input,
                             const PackedMatrix& matrix, const std::vector<float>& bias, const LoraDelta& delta) {
  float* target = residual(rows, block.first_row);
  product_.run(team, input, matrix, [&](int first_row, int count, int panel, float* sums) {
    delta.add_to(sums, first_row, count, panel);
    const int column = panel * kPanelColumns;
    kernels_.add_f32(target + first_row * residual_stride() + column, residual_stride(), sums, or_null(bias, column),
                     count, std::min(kPanelColumns, shape_.hidden_size - column));
  });
}

}  // namespace caudex::kernels
