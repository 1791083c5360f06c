#include "kernels/kv_pool.hpp"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace caudex::kernels {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr int kRowsPerItem = 16;

int checked(const char* name, int value, int low, int high) {
  if (value < low || value > high) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; expected " +
                                std::to_string(low) + " to " + std::to_string(high));
  }
  return value;
}

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// One element, or a bfloat16 pair, goes every 16 tokens of a key chunk.
void write_key_f32(char* chunk, int token, const char* source, int head_dim) {
  float* target = reinterpret_cast<float*>(chunk) + token;
  for (int i = 0; i < head_dim; ++i) std::memcpy(target + i * kChunkTokens, source + i * sizeof(float), sizeof(float));
}

void write_key_bf16(char* chunk, int token, const char* source, int head_dim) {
  char* target = chunk + token * 4;
  int i = 0;
  for (; i + 1 < head_dim; i += 2) std::memcpy(target + i * (kChunkTokens * 2), source + i * 2, 4);
  if (i < head_dim) std::memcpy(target + i * (kChunkTokens * 2), source + i * 2, 2);
}

void write_value_bf16(char* chunk, int token, const char* source, int head_dim, int padded_head_dim) {
  bf16* target = reinterpret_cast<bf16*>(chunk) + (token / 2) * padded_head_dim * 2 + token % 2;
  const bf16* values = reinterpret_cast<const bf16*>(source);
  for (int i = 0; i < head_dim; ++i) target[2 * i] = values[i];
}

void write_key_int8(char* chunk, int token, const char* source, int key_steps) {
  char* target = chunk + token * 4;
  for (int i = 0; i < key_steps; ++i) {
    std::uint32_t four;
    std::memcpy(&four, source + i * 4, sizeof(four));
    four ^= 0x80808080u;  // each plus 128
    std::memcpy(target + i * (kChunkTokens * 4), &four, sizeof(four));
  }
  std::memcpy(target + key_steps * (kChunkTokens * 4), source + key_steps * 4, sizeof(float));
}

void write_value_int8(char* chunk, int token, const char* source, int head_dim, int padded_head_dim) {
  char* target = chunk + (token / 4) * padded_head_dim * 4 + token % 4;
  for (int i = 0; i < head_dim; ++i) target[4 * i] = source[i];
  std::memcpy(chunk + kChunkTokens * padded_head_dim + token * sizeof(float), source + round_up(head_dim, 4),
              sizeof(float));
}

}  // namespace

KvLayout::KvLayout(int num_layers, int block_size, int num_kv_heads, int head_dim, DType dtype, DType kv_dtype)
    : num_layers(checked("num_layers", num_layers, 1, 1 << 16)),
      block_size(checked("block_size", block_size, 1, 256)),
      num_kv_heads(checked("num_kv_heads", num_kv_heads, 1, 1 << 16)),
      head_dim(checked("head_dim", head_dim, 1, kMaxHeadDim)),
      dtype(dtype),
      kv_dtype(kv_dtype),
      chunked(block_size % kChunkTokens == 0) {
  if (dtype == DType::kInt8 || (kv_dtype != dtype && kv_dtype != DType::kInt8)) {
    throw std::invalid_argument("keys and values are kept in the type they come in, or in int8");
  }
  const int depth = depth_per_step(kv_dtype);
  const std::size_t scales_bytes = kv_dtype == DType::kInt8 ? kChunkTokens * sizeof(float) : 0;
  key_steps = (head_dim + depth - 1) / depth;
  padded_head_dim = round_up(head_dim, 16);
  key_chunk_bytes = static_cast<std::size_t>(key_steps) * kChunkTokens * 4 + scales_bytes;
  value_chunk_bytes = static_cast<std::size_t>(kChunkTokens / depth) * padded_head_dim * 4 + scales_bytes;
  const std::size_t chunks = block_size / kChunkTokens;
  const std::size_t rows = block_size * kept_row_bytes();
  keys_bytes = chunked ? chunks * key_chunk_bytes : rows;
  head_bytes = aligned(keys_bytes + (chunked ? chunks * value_chunk_bytes : rows));
  layer_bytes = head_bytes * num_kv_heads;
  block_bytes = layer_bytes * num_layers;
}

void KvLayout::store_in_chunk(char* keys, char* values, int token, const char* key, const char* value) const {
  if (kv_dtype == DType::kInt8) {
    write_key_int8(keys, token, key, key_steps);
    write_value_int8(values, token, value, head_dim, padded_head_dim);
  } else if (kv_dtype == DType::kFloat32) {
    write_key_f32(keys, token, key, head_dim);
    std::memcpy(values + static_cast<std::size_t>(token) * padded_head_dim * 4, value, row_bytes());
  } else {
    write_key_bf16(keys, token, key, head_dim);
    write_value_bf16(values, token, value, head_dim, padded_head_dim);
  }
}

KvPool::KvPool(KvLayout layout, int num_blocks, const KernelTable& kernels)
    : layout_(std::move(layout)),
      num_blocks_(checked("num_blocks", num_blocks, 1, 1 << 30)),
      kernels_(kernels),
      memory_(layout_.block_bytes * static_cast<std::size_t>(num_blocks_)) {}

void KvPool::quantize_key(char* row, const char* source) const {
  auto* values = reinterpret_cast<std::int8_t*>(row);
  const QuantizedRow quantized =
      layout_.dtype == DType::kFloat32
          ? kernels_.quantize_hadamard_f32(values, reinterpret_cast<const float*>(source), layout_.head_dim)
          : kernels_.quantize_hadamard_bf16(values, reinterpret_cast<const bf16*>(source), layout_.head_dim);
  std::memcpy(row + layout_.key_steps * 4, &quantized.scale, sizeof(float));
}

void KvPool::quantize_value(char* row, const char* source) const {
  auto* values = reinterpret_cast<std::int8_t*>(row);
  const QuantizedRow quantized =
      layout_.dtype == DType::kFloat32
          ? kernels_.quantize_row_f32(values, reinterpret_cast<const float*>(source), layout_.head_dim)
          : kernels_.quantize_row_bf16(values, reinterpret_cast<const bf16*>(source), layout_.head_dim);
  std::memcpy(row + layout_.key_steps * 4, &quantized.scale, sizeof(float));
}

void KvPool::write_row(int layer, const Batch& batch, int row, const HeadRows& keys, const HeadRows& values) {
  const KvLayout& at = layout_;
  const std::size_t element = element_size(at.dtype), kept_bytes = at.kept_row_bytes();
  char quantized[2][kMaxHeadDim + sizeof(float)];
  const RowSlot slot = batch.slot(row);
  for (int head = 0; head < at.num_kv_heads; ++head) {
    const char* key = keys.data + (row * keys.row_stride + head * keys.head_stride) * element;
    const char* value = values.data + (row * values.row_stride + head * values.head_stride) * element;
    char* head_keys = block(slot.block) + layer * at.layer_bytes + head * at.head_bytes;
    char* head_values = head_keys + at.keys_bytes;
    if (at.kv_dtype == DType::kInt8) {
      quantize_key(quantized[0], key);
      quantize_value(quantized[1], value);
      key = quantized[0];
      value = quantized[1];
    }
    if (!at.chunked) {
      std::memcpy(head_keys + slot.offset * kept_bytes, key, kept_bytes);
      std::memcpy(head_values + slot.offset * kept_bytes, value, kept_bytes);
      continue;
    }
    const int chunk = slot.offset / kChunkTokens;
    at.store_in_chunk(head_keys + chunk * at.key_chunk_bytes, head_values + chunk * at.value_chunk_bytes,
                      slot.offset % kChunkTokens, key, value);
  }
}

void KvPool::write(int layer, HeadRows keys, HeadRows values, const Batch& batch, ThreadPool& threads) {
  const int rows = batch.num_rows();
  threads.run((rows + kRowsPerItem - 1) / kRowsPerItem, [&](int item, int) {
    const int end = (item + 1) * kRowsPerItem < rows ? (item + 1) * kRowsPerItem : rows;
    for (int row = item * kRowsPerItem; row < end; ++row) write_row(layer, batch, row, keys, values);
  });
}

void KvPool::copy_block(int source, int target) {
  if (source != target) std::memcpy(block(target), block(source), layout_.block_bytes);
}

}  // namespace caudex::kernels
