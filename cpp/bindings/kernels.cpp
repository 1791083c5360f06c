#include "bindings/kernel_arguments.hpp"
#include "kernels/attention_plan.hpp"
#include "kernels/batch.hpp"
#include "kernels/isa.hpp"
#include "kernels/kv_pool.hpp"
#include "kernels/paged_attention.hpp"
#include "kernels/thread_pool.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>

namespace nb = nanobind;
using namespace nb::literals;

namespace caudex {
namespace {

using kernels::AttentionPlan;
using kernels::Batch;
using kernels::HeadRows;
using kernels::KvLayout;
using kernels::KvPool;
using kernels::PagedAttention;
using kernels::ThreadPool;

HeadRows head_rows(Address data, std::ptrdiff_t row_stride, std::ptrdiff_t head_stride) {
  return {reinterpret_cast<const char*>(data), row_stride, head_stride};
}

void check_block(const KvPool& pool, int block) {
  if (block < 0 || block >= pool.num_blocks()) {
    throw std::invalid_argument("block " + std::to_string(block) + " is outside the pool of " +
                                std::to_string(pool.num_blocks()));
  }
}

void check_fits(const KvPool& pool, int layer, const Batch& batch) {
  if (layer < 0 || layer >= pool.layout().num_layers) {
    throw std::invalid_argument("layer " + std::to_string(layer) + " is outside the pool's " +
                                std::to_string(pool.layout().num_layers));
  }
  if (batch.block_size() != pool.layout().block_size || batch.num_blocks() > pool.num_blocks()) {
    throw std::invalid_argument("the batch was made for another pool");
  }
}

void bind_pool(nb::module_& m) {
  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int>(), "num_threads"_a)
      .def_prop_ro("num_threads", &ThreadPool::num_threads);

  nb::class_<KvPool>(m, "KvPool")
      .def(
          "__init__",
          [](KvPool* self, int num_layers, int num_blocks, int block_size, int num_kv_heads, int head_dim,
             const std::string& dtype, bool quantized, const std::string& isa) {
            const kernels::DType kept = quantized ? kernels::DType::kInt8 : dtype_named(dtype);
            const KvLayout layout(num_layers, block_size, num_kv_heads, head_dim, dtype_named(dtype), kept);
            new (self) KvPool(layout, num_blocks, kernels::kernels_for(isa));
          },
          "num_layers"_a, "num_blocks"_a, "block_size"_a, "num_kv_heads"_a, "head_dim"_a, "dtype"_a, "quantized"_a,
          "isa"_a)
      .def_prop_ro("num_blocks", &KvPool::num_blocks)
      .def_prop_ro("num_bytes", &KvPool::num_bytes)
      .def_prop_ro("block_bytes", [](const KvPool& pool) { return pool.layout().block_bytes; })
      .def(
          "write",
          [](KvPool& pool, int layer, Address keys, std::ptrdiff_t key_row, std::ptrdiff_t key_head, Address values,
             std::ptrdiff_t value_row, std::ptrdiff_t value_head, const Batch& batch, ThreadPool& threads) {
            check_fits(pool, layer, batch);
            pool.write(layer, head_rows(keys, key_row, key_head), head_rows(values, value_row, value_head), batch,
                       threads);
          },
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "copy_block",
          [](KvPool& pool, int source, int target) {
            check_block(pool, source);
            check_block(pool, target);
            pool.copy_block(source, target);
          },
          "source"_a, "target"_a)
      .def(
          "export_block",
          [](const KvPool& pool, int block) {
            check_block(pool, block);
            return nb::bytes(pool.block(block), pool.layout().block_bytes);
          },
          "block"_a)
      .def(
          "import_block",
          [](KvPool& pool, int block, const nb::bytes& data) {
            check_block(pool, block);
            if (data.size() != pool.layout().block_bytes) {
              throw std::invalid_argument("a block of this pool is " + std::to_string(pool.layout().block_bytes) +
                                          " bytes; got " + std::to_string(data.size()));
            }
            std::memcpy(pool.block(block), data.c_str(), data.size());
          },
          "block"_a, "data"_a);
}

void bind_batch(nb::module_& m) {
  nb::class_<Batch>(m, "Batch")
      .def(
          "__init__",
          [](Batch* self, const std::vector<Int32s>& block_tables, const Int32s& query_lens, const Int32s& context_lens,
             int block_size, int num_blocks) {
            std::vector<std::vector<std::int32_t>> tables;
            tables.reserve(block_tables.size());
            for (const Int32s& table : block_tables) tables.push_back(to_vector(table));
            new (self) Batch(std::move(tables), to_vector(query_lens), to_vector(context_lens), block_size, num_blocks);
          },
          "block_tables"_a, "query_lens"_a, "context_lens"_a, "block_size"_a, "num_blocks"_a)
      .def_prop_ro("num_rows", &Batch::num_rows)
      .def_prop_ro("num_sequences", [](const Batch& batch) { return batch.sequences().size(); })
      .def("positions", [](const Batch& batch) {
        auto* positions = new std::vector<std::int32_t>(batch.positions());
        nb::capsule owner(positions, [](void* p) noexcept { delete static_cast<std::vector<std::int32_t>*>(p); });
        return nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>(positions->data(), {positions->size()}, owner);
      });

  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(nb::init<const Batch&, int, int, int>(), "batch"_a, "num_kv_heads"_a, "group_size"_a, "num_threads"_a,
           nb::keep_alive<1, 2>());
}

void bind_attention(nb::module_& m) {
  nb::class_<PagedAttention>(m, "PagedAttention")
      .def(
          "__init__",
          [](PagedAttention* self, const KvPool& pool, ThreadPool& threads, const std::string& isa) {
            new (self) PagedAttention(pool, kernels::kernels_for(isa), threads);
          },
          "pool"_a, "threads"_a, "isa"_a = "auto", nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def_prop_ro("isa", &PagedAttention::isa)
      .def(
          "run",
          [](PagedAttention& attention, int layer, Address query, std::ptrdiff_t row_stride, std::ptrdiff_t head_stride,
             Address output, const Batch& batch, const AttentionPlan& plan, int group_size, float scale) {
            check_fits(attention.pool(), layer, batch);
            attention.run(layer, head_rows(query, row_stride, head_stride), reinterpret_cast<char*>(output), batch,
                          plan, group_size, scale);
          },
          nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("available_isas", &kernels::available_isas);
  bind_pool(m);
  bind_batch(m);
  bind_attention(m);
}

}  // namespace caudex
