#include "bindings/kernel_arguments.hpp"
#include "kernels/isa.hpp"
#include "kernels/llama.hpp"
#include "kernels/packed_matrix.hpp"
#include "kernels/packed_product.hpp"
#include "kernels/rms_norm.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

namespace nb = nanobind;
using namespace nb::literals;

namespace caudex {
namespace {

using kernels::Arena;
using kernels::AttentionPlan;
using kernels::Batch;
using kernels::DType;
using kernels::KvPool;
using kernels::LlamaModel;
using kernels::LlamaShape;
using kernels::LoraPair;
using kernels::MatrixRows;
using kernels::PackedMatrix;
using kernels::PackedProduct;
using kernels::RmsNorm;
using kernels::Team;
using kernels::ThreadPool;

// output = input x matrix + bias, [rows, columns] contiguous, in the matrix's type.
void multiply(PackedProduct& product, const PackedMatrix& matrix, const float* bias, const char* input,
              std::size_t row_stride, int num_rows, char* output) {
  const auto& kernels = product.kernels();
  const std::size_t stride = matrix.num_columns();
  const MatrixRows rows{input, row_stride * kernels::element_size(matrix.dtype()), num_rows};
  product.run(Team::all(product.threads()), rows, matrix,
              [&](int first_row, int rows, int panel, const float* sums) {
                const int column = panel * kernels::kPanelColumns;
                const int columns = std::min(kernels::kPanelColumns, matrix.num_columns() - column);
                const float* panel_bias = bias ? bias + column : nullptr;
                const std::size_t first = first_row * stride + column;
                if (matrix.dtype() == DType::kFloat32) {
                  float* target = reinterpret_cast<float*>(output) + first;
                  kernels.store_f32(target, stride, sums, panel_bias, rows, columns);
                } else {
                  kernels::bf16* target = reinterpret_cast<kernels::bf16*>(output) + first;
                  kernels.store_bf16(target, stride, sums, panel_bias, rows, columns);
                }
              });
}

// A matrix of `weights`, whose element (column, row) is `column * column_stride + row * depth_stride` elements in,
// quantized to `bits`, or (0) as it is, encoded where that makes `product` quicker.
PackedMatrix pack(const PackedProduct& product, Arena& arena, DType dtype, int num_columns, int depth,
                  const char* weights, std::ptrdiff_t column_stride, std::ptrdiff_t depth_stride, int bits) {
  const bool quantized = bits != 0, encodes = product.encodes(dtype) && !quantized;
  Arena plain;
  PackedMatrix matrix(num_columns, depth, dtype, encodes || quantized ? plain : arena);
  const auto size = static_cast<std::ptrdiff_t>(kernels::element_size(dtype));
  for (int column = 0; column < num_columns; ++column) {
    matrix.set_column(column, weights + column * column_stride * size, depth_stride);
  }
  if (encodes) matrix.encode(arena, product.threads());
  if (quantized) matrix.quantize(bits, arena, product.threads());
  return matrix;
}

void bind_products(nb::module_& m) {
  nb::class_<Arena>(m, "Arena").def(nb::init<>());

  nb::class_<PackedMatrix>(m, "PackedMatrix")
      .def(
          "__init__",
          [](PackedMatrix* self, const PackedProduct& product, Arena& arena, const std::string& dtype, int num_columns,
             int depth, Address weights, std::ptrdiff_t column_stride, std::ptrdiff_t depth_stride,
             int bits) {
            new (self) PackedMatrix(pack(product, arena, dtype_named(dtype), num_columns, depth,
                                         pointer<const char>(weights), column_stride, depth_stride, bits));
          },
          "product"_a, "arena"_a, "dtype"_a, "num_columns"_a, "depth"_a, "weights"_a, "column_stride"_a,
          "depth_stride"_a, "bits"_a = 0, nb::keep_alive<1, 3>())
      .def_prop_ro("num_bytes", &PackedMatrix::num_bytes);

  nb::class_<PackedProduct>(m, "PackedProduct")
      .def(
          "__init__",
          [](PackedProduct* self, ThreadPool& threads, const std::string& isa) {
            new (self) PackedProduct(kernels::kernels_for(isa), threads);
          },
          "threads"_a, "isa"_a = "auto", nb::keep_alive<1, 2>())
      .def_prop_ro("isa", [](const PackedProduct& product) { return product.kernels().name; })
      .def(
          "run",
          [](PackedProduct& product, const PackedMatrix& matrix, Address bias, Address input, std::size_t row_stride,
             int num_rows, Address output) {
            multiply(product, matrix, pointer<const float>(bias), pointer<const char>(input), row_stride, num_rows,
                     pointer<char>(output));
          },
          nb::call_guard<nb::gil_scoped_release>());
}

void bind_norm(nb::module_& m) {
  nb::class_<RmsNorm>(m, "RmsNorm")
      .def(
          "__init__",
          [](RmsNorm* self, ThreadPool& threads, const std::string& isa, Address weight, int count, float epsilon) {
            new (self) RmsNorm(pointer<const float>(weight), count, epsilon, kernels::kernels_for(isa), threads);
          },
          "threads"_a, "isa"_a, "weight"_a, "count"_a, "epsilon"_a, nb::keep_alive<1, 2>())
      .def(
          "run",
          [](RmsNorm& norm, const std::string& dtype, Address input, int rows, Address output) {
            norm.run(dtype_named(dtype), pointer<const char>(input), rows, pointer<char>(output));
          },
          nb::call_guard<nb::gil_scoped_release>());
}

// A LoraPair: role, rank, down, up, scale.
using PairArguments = std::tuple<std::string, int, Address, Address, float>;

void bind_llama(nb::module_& m) {
  nb::class_<LlamaModel>(m, "LlamaModel")
      .def(
          "__init__",
          [](LlamaModel* self, KvPool& pool, ThreadPool& threads, const std::string& isa, int num_layers,
             int hidden_size, int intermediate_size, int num_query_heads, int num_kv_heads, int head_dim,
             int vocab_size, int max_positions, bool normed_heads, bool tied_embedding, float norm_epsilon,
             float attention_scale, const std::string& dtype) {
            const LlamaShape shape{num_layers,   hidden_size,     intermediate_size, num_query_heads, num_kv_heads,
                                   head_dim,     vocab_size,      max_positions,     normed_heads,    tied_embedding,
                                   norm_epsilon, attention_scale, dtype_named(dtype)};
            new (self) LlamaModel(shape, pool, threads, kernels::kernels_for(isa));
          },
          "pool"_a, "threads"_a, "isa"_a, nb::kw_only(), "num_layers"_a, "hidden_size"_a, "intermediate_size"_a,
          "num_query_heads"_a, "num_kv_heads"_a, "head_dim"_a, "vocab_size"_a, "max_positions"_a, "normed_heads"_a,
          "tied_embedding"_a, "norm_epsilon"_a, "attention_scale"_a, "dtype"_a, nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>())
      .def_prop_ro("num_bytes", [](LlamaModel& model) { return model.num_bytes() + model.adapters().num_bytes(); })
      .def(
          "set_linear",
          [](LlamaModel& model, const std::string& role, int layer, Address weight, Address bias) {
            model.set_linear(role, layer, pointer<const char>(weight), pointer<const float>(bias));
          },
          "role"_a, "layer"_a, "weight"_a, "bias"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("encode", &LlamaModel::encode, "layer"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("quantize", &LlamaModel::quantize, "layer"_a, "bits"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "set_norm",
          [](LlamaModel& model, const std::string& role, int layer, Address weight) {
            model.set_norm(role, layer, pointer<const float>(weight));
          },
          "role"_a, "layer"_a, "weight"_a)
      .def(
          "set_rotation",
          [](LlamaModel& model, Address cos, Address sin) {
            model.set_rotation(pointer<const float>(cos), pointer<const float>(sin));
          },
          "cos"_a, "sin"_a)
      .def("add_adapter", [](LlamaModel& model) { return model.adapters().add_adapter(); })
      .def(
          "set_adapter_layer",
          [](LlamaModel& model, int adapter, int layer, const std::vector<PairArguments>& arguments) {
            std::vector<LoraPair> pairs;
            for (const auto& [role, rank, down, up, scale] : arguments) {
              pairs.push_back({role, rank, pointer<const char>(down), pointer<const char>(up), scale});
            }
            model.adapters().set_layer(adapter, layer, pairs);
          },
          "adapter"_a, "layer"_a, "pairs"_a)
      .def("forward", [](LlamaModel& model, const Int32s& tokens, const Batch& batch, const AttentionPlan& plan,
                         const Int32s& adapters, const Int32s& logit_rows, Address logits) {
        if (tokens.shape(0) != static_cast<std::size_t>(batch.num_rows())) {
          throw std::invalid_argument(std::to_string(tokens.shape(0)) + " tokens for a batch of " +
                                      std::to_string(batch.num_rows()) + " rows");
        }
        if (batch.block_size() != model.pool().layout().block_size || batch.num_blocks() > model.pool().num_blocks()) {
          throw std::invalid_argument("the batch was made for another pool");
        }
        const std::vector<std::int32_t> chosen = to_vector(adapters), rows = to_vector(logit_rows);
        nb::gil_scoped_release release;
        model.forward(tokens.data(), batch, plan, chosen, rows, pointer<float>(logits));
      });
}

}  // namespace

void bind_models(nb::module_& m) {
  bind_products(m);
  bind_norm(m);
  bind_llama(m);
}

}  // namespace caudex
