#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/aligned_buffer.hpp"
#include "kernels/attention_plan.hpp"
#include "kernels/kv_pool.hpp"
#include "kernels/llama_shape.hpp"
#include "kernels/lora.hpp"
#include "kernels/packed_matrix.hpp"
#include "kernels/packed_product.hpp"
#include "kernels/paged_attention.hpp"

namespace caudex::kernels {

// Decoders of the Llama family (Llama, Mistral, Qwen2, Qwen3), a whole forward pass a call.
//
// Activations are rounded to the model's type where they enter a product, and queries, keys and values where they
// enter attention; the residual stream, norms, rotations and logits are float32. A token's logits depend, to the bit,
// on the tokens before it alone. Not for use from two threads at once.
class LlamaModel {
 public:
  // `pool` must have the shape's layers, KV heads, head dimension and type. The pool and the threads outlive the model.
  LlamaModel(const LlamaShape& shape, KvPool& pool, ThreadPool& threads, const KernelTable& kernels);

  // Take a linear layer's weight, [outputs, inputs] in the model's type, and its bias, [outputs] float32 or null.
  // Roles: those of `place_of`; "head" and "embedding" belong to no layer.
  // Throws std::invalid_argument for another role.
  void set_linear(const std::string& role, int layer, const char* weight, const float* bias);

  // Encode what has been set of a layer, or of what belongs to none (-1: the head), in 12 bits a weight where that makes
  // products quicker. To be called once, when all its weights are set. Throws std::invalid_argument for another layer.
  void encode(int layer);

  // Quantize what has been set of a layer, or the head (-1), to 8 or 4 bits a weight instead, with loss; its products'
  // inputs are quantized too.
  void quantize(int layer, int bits);

  // Take a norm's weight, float32. Roles: "attention", "mlp", "query", "key"; "final" belongs to no layer.
  void set_norm(const std::string& role, int layer, const float* weight);

  // cos and sin of every position's angles: [max_positions][head_dim / 2] each.
  void set_rotation(const float* cos, const float* sin);

  // Low-rank adapters that a step's sequences may choose.
  LoraAdapters& adapters() { return adapters_; }

  // Run the batch's rows through every layer, writing their keys and values to the pool.
  //   tokens      [rows] token ids
  //   adapters    of each sequence, -1 for none; empty: none has one
  //   logit_rows  rows whose logits are wanted; the last layer's second half is computed for these only
  //   logits      [logit_rows][vocab_size]
  // Throws std::invalid_argument for a token, an adapter, a position or a row out of range, before anything is written.
  void forward(const std::int32_t* tokens, const Batch& batch, const AttentionPlan& plan,
               const std::vector<std::int32_t>& adapters, const std::vector<std::int32_t>& logit_rows, float* logits);

  const LlamaShape& shape() const { return shape_; }
  const KvPool& pool() const { return pool_; }
  std::size_t num_bytes() const;

 private:
  struct Layer {
    std::unique_ptr<Arena> plain;  // where the weights are until they are encoded
    PackedMatrix qkv, output, gate_up, down;
    std::vector<float> qkv_bias, output_bias, gate_up_bias, down_bias;      // padded to whole panels; empty: none
    std::vector<float> attention_norm, mlp_norm, query_norm, key_norm;  // padded to 16
  };
  // Rows that go through the layers together. Few rows are one block, whose products all threads share out panel by
  // panel; of many, every thread takes blocks of its own from one attention to the next, and waits for none between.
  struct Block {
    int first_row, num_rows;
    LoraRows adapted;
  };
  struct Rows {
    AlignedBuffer residual, heads, attended;
    std::vector<Block> blocks;
  };
  // What becomes of a block's rows on the way.
  struct Scratch {
    AlignedBuffer normed, projected, activated;
  };

  Layer make_layer();
  void check_step(const std::int32_t* tokens, const Batch& batch, const std::vector<std::int32_t>& adapters,
                  const std::vector<std::int32_t>& logit_rows) const;
  void prepare(const Batch& batch, const std::vector<std::int32_t>& adapters,
               const std::vector<std::int32_t>& logit_rows);
  void cut(Rows& rows, int num_rows, const std::vector<std::int32_t>& adapters) const;
  template <class Body>
  void for_blocks(const Rows& rows, const Body& body);
  void embed(const Team& team, const Block& block, const std::int32_t* tokens);
  void begin_layer(const Team& team, const Block& block, int index, const Batch& batch);
  void place_heads(int index, const Batch& batch, int row, float* projected);
  void normalize_head(float* head, const std::vector<float>& weight) const;
  void attend(int index, const Batch& batch, const AttentionPlan& plan);
  void select_rows(const std::vector<std::int32_t>& rows);
  void finish_layer(const Team& team, Rows& rows, const Block& block, int index);
  void multiply_head(const Team& team, const Block& block, float* logits);
  MatrixRows normalize(const Team& team, Rows& rows, const Block& block, const std::vector<float>& weight);
  MatrixRows activate(const Team& team, const Block& block, int index, const MatrixRows& normed);
  void add_product(const Team& team, Rows& rows, const Block& block, const MatrixRows& input,
                   const PackedMatrix& matrix, const std::vector<float>& bias, const LoraDelta& delta);

  float* residual(Rows& rows, int row) const {
    return reinterpret_cast<float*>(rows.residual.data()) + row * residual_stride();
  }
  std::size_t residual_stride() const { return round_up(shape_.hidden_size, kPanelColumns); }  // floats
  std::size_t heads_stride() const { return layers_[0].qkv.padded_columns(); }  // elements
  std::size_t normed_bytes() const { return residual_stride() * element_size(shape_.dtype); }
  std::size_t attended_bytes() const {
    return static_cast<std::size_t>(shape_.num_query_heads) * shape_.head_dim * element_size(shape_.dtype);
  }
  std::size_t activated_bytes() const { return round_up(shape_.intermediate_size, 16) * element_size(shape_.dtype); }

  LlamaShape shape_;
  KvPool& pool_;
  ThreadPool& threads_;
  const KernelTable& kernels_;
  PackedProduct product_;
  PagedAttention attention_;
  LoraAdapters adapters_;
  std::vector<Scratch> scratch_;  // a team's, by its leader
  Arena arena_;
  std::unique_ptr<Arena> plain_head_ = std::make_unique<Arena>();
  std::vector<Layer> layers_;
  PackedMatrix head_;
  std::vector<float> head_bias_;
  char* embedding_ = nullptr;  // [vocab][hidden] in the model's type, unless tied
  std::vector<float> final_norm_, cos_, sin_;
  Rows all_;       // the batch's rows
  Rows selected_;  // those whose logits are wanted
};

}  // namespace caudex::kernels
