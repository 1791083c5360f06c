// A whole forward pass on every instruction set this machine has: many rows in one step, taken through the layers in
// blocks by several threads, beside the same rows a few at a time.
#include "kernels/llama.hpp"

#include <algorithm>
#include <numeric>

#include "check.hpp"
#include "kernel_values.hpp"
#include "kernels/isa.hpp"

using namespace caudex::kernels;
using caudex::test::Values;

namespace {

constexpr int kTokens = 230, kBlockSize = 16, kNumBlocks = kTokens / kBlockSize + 1;

LlamaShape shape_of(DType dtype, bool normed_heads) {
  LlamaShape shape{};
  shape.num_layers = 2;
  shape.hidden_size = 72;
  shape.intermediate_size = 100;
  shape.num_query_heads = 6;
  shape.num_kv_heads = 2;
  shape.head_dim = 12;
  shape.vocab_size = 67;
  shape.max_positions = kTokens;
  shape.normed_heads = normed_heads;
  shape.tied_embedding = true;
  shape.norm_epsilon = 1e-5f;
  shape.attention_scale = 0.3f;
  shape.dtype = dtype;
  return shape;
}

enum class Weights { kPlain, kEncoded, kQuantized };

// A model of random weights with one adapter, over a pool of one sequence's blocks. Equal seeds give equal models.
class Model {
 public:
  Model(const LlamaShape& shape, const KernelTable& kernels, Weights weights, int num_threads)
      : shape_(shape),
        threads_(num_threads),
        pool_(KvLayout(shape.num_layers, kBlockSize, shape.num_kv_heads, shape.head_dim, shape.dtype, shape.dtype),
              kNumBlocks, kernels),
        model_(shape, pool_, threads_, kernels) {
    model_.set_linear("head", -1, matrix(shape.vocab_size, shape.hidden_size).at(0), nullptr);
    model_.set_norm("final", -1, norm(shape.hidden_size).data());
    const std::vector<float> angles(static_cast<std::size_t>(shape.max_positions) * shape.head_dim / 2, 0.7f);
    model_.set_rotation(angles.data(), angles.data());
    const int adapter = model_.adapters().add_adapter();
    for (int layer = 0; layer < shape.num_layers; ++layer) fill(layer, adapter);
    for (int layer = -1; layer < shape.num_layers; ++layer) {
      if (weights == Weights::kEncoded) model_.encode(layer);
      if (weights == Weights::kQuantized && layer >= 0) model_.quantize(layer);
    }
  }

  // The logits of tokens [first, end) of the sequence, computed in one step.
  std::vector<float> step(const std::vector<std::int32_t>& tokens, int first, int end, int adapter) {
    std::vector<std::int32_t> blocks(kNumBlocks), rows(end - first);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::iota(rows.begin(), rows.end(), 0);
    const Batch batch({blocks}, {end - first}, {end}, kBlockSize, kNumBlocks);
    const AttentionPlan plan(batch, shape_.num_kv_heads, shape_.num_query_heads / shape_.num_kv_heads,
                             threads_.num_threads());
    std::vector<float> logits(rows.size() * shape_.vocab_size);
    model_.forward(tokens.data() + first, batch, plan, {adapter}, rows, logits.data());
    return logits;
  }

 private:
  Values matrix(int outputs, int inputs) {
    Values values(shape_.dtype, static_cast<std::size_t>(outputs) * inputs);
    std::normal_distribution<float> normal(0.0f, 0.3f);
    for (int i = 0; i < outputs * inputs; ++i) values.set(i, normal(random_));
    return values;
  }

  std::vector<float> norm(int count) {
    std::vector<float> weights(count);
    for (float& weight : weights) weight = std::uniform_real_distribution<float>(0.5f, 2.0f)(random_);
    return weights;
  }

  void fill(int layer, int adapter) {
    constexpr int kRank = 5;
    std::vector<Values> matrices;
    std::vector<LoraPair> pairs;
    for (const char* role : {"query", "key", "value", "output", "gate", "up", "down"}) {
      const LinearPlace place = place_of(shape_, role);
      model_.set_linear(role, layer, matrix(place.num_outputs, place.num_inputs).at(0), nullptr);
      matrices.push_back(matrix(kRank, place.num_inputs));
      matrices.push_back(matrix(place.num_outputs, kRank));
      pairs.push_back({role, kRank, matrices[matrices.size() - 2].at(0), matrices.back().at(0), 0.5f});
    }
    model_.adapters().set_layer(adapter, layer, pairs);
    for (const char* role : {"attention", "mlp"}) model_.set_norm(role, layer, norm(shape_.hidden_size).data());
    for (const char* role : {"query", "key"}) model_.set_norm(role, layer, norm(shape_.head_dim).data());
  }

  LlamaShape shape_;
  std::mt19937 random_{7};
  ThreadPool threads_;
  KvPool pool_;
  LlamaModel model_;
};

void check_blocks(const LlamaShape& shape, const KernelTable& kernels, Weights weights, int adapter) {
  std::vector<std::int32_t> tokens(kTokens);
  std::mt19937 random(3);
  for (std::int32_t& token : tokens) token = static_cast<std::int32_t>(random() % shape.vocab_size);
  Model alone(shape, kernels, weights, 1);
  std::vector<float> expected;
  for (int first = 0; first < kTokens;) {
    const int end = std::min(kTokens, first + 1 + static_cast<int>(random() % 20));
    const std::vector<float> logits = alone.step(tokens, first, end, adapter);
    expected.insert(expected.end(), logits.begin(), logits.end());
    first = end;
  }
  for (const int num_threads : {1, 2, 3}) {
    CHECK(Model(shape, kernels, weights, num_threads).step(tokens, 0, kTokens, adapter) == expected);
  }
}

}  // namespace

int main() {
  for (const std::string& isa : available_isas()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const Weights weights : {Weights::kPlain, Weights::kEncoded, Weights::kQuantized}) {
        for (const int adapter : {-1, 0}) {
          check_blocks(shape_of(dtype, weights == Weights::kPlain), kernels_for(isa), weights, adapter);
        }
      }
    }
  }
  return 0;
}
