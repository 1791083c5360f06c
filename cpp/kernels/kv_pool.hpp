#pragma once

#include <cstddef>

#include "kernels/batch.hpp"
#include "kernels/kernel_table.hpp"
#include "kernels/memory.hpp"
#include "kernels/thread_pool.hpp"

namespace caudex::kernels {

// Rows of heads as a caller holds them: element (row, head, i) is at data[row * row_stride + head * head_stride + i].
struct HeadRows {
  const char* data;
  std::ptrdiff_t row_stride;   // elements
  std::ptrdiff_t head_stride;  // elements
};

// How the keys and values of a head lie in a block.
//
//   block = [layer][KV head][keys | values]
//
// Where the block size is a multiple of 16, 16 tokens form a chunk that the attention kernels read as it is:
//   keys    [chunk][head_dim / depth][16 tokens][depth]           a register holds one dimension of 16 tokens
//   values  [chunk][16 / depth tokens][padded head_dim][depth]    a register holds 16 dimensions of one token
// (depth: 2 for bfloat16, which is multiplied in pairs; 1 for float32; 4 for int8.) Any other block size keeps plain
// rows, [token][head_dim], which are rearranged while they are read: right, but slower.
//
// In int8 a token's value is its largest magnitude / 127, a float32, times whole numbers from -127 to 127, and so is the
// Walsh-Hadamard transform of its key: what is kept of a token depends on that token alone. The 16 scales of a chunk
// stand behind its keys and behind its values, the scale of a plain row behind the row. In chunks keys are kept plus 128
// (see "Rows and weights in 8 bits" and "Attention over keys and values in 8 bits" in kernel_table.hpp).
struct KvLayout {
  KvLayout(int num_layers, int block_size, int num_kv_heads, int head_dim, DType dtype, DType kv_dtype);

  int num_layers, block_size, num_kv_heads, head_dim;
  DType dtype;     // of keys and values as they are written, of queries and outputs
  DType kv_dtype;  // of keys and values as they are kept: `dtype`, or int8
  bool chunked;
  int key_steps;        // head_dim / depth, rounded up
  int padded_head_dim;  // a multiple of 16
  std::size_t key_chunk_bytes, value_chunk_bytes;
  std::size_t keys_bytes, head_bytes, layer_bytes, block_bytes;

  std::size_t row_bytes() const { return head_dim * element_size(dtype); }

  // Of a plain row of the pool. In int8 the values are filled up with zeros to whole steps, and the scale follows.
  std::size_t kept_row_bytes() const {
    return kv_dtype == DType::kInt8 ? static_cast<std::size_t>(key_steps) * 4 + sizeof(float) : row_bytes();
  }

  // Store one token's key and value, plain rows of the pool, as token `token` (0 to 15) of a chunk.
  void store_in_chunk(char* keys, char* values, int token, const char* key, const char* value) const;
};

// The memory that holds the keys and values of every layer, in `num_blocks` blocks of `block_size` token slots.
// Pages are taken from the system when they are first written and read as zero until then. Blocks are whole in memory
// (all layers side by side), so copying or exporting one is a single memcpy.
class KvPool {
 public:
  // Throws std::invalid_argument for a size out of range and std::bad_alloc if the address space cannot be had.
  KvPool(KvLayout layout, int num_blocks, const KernelTable& kernels);

  const KvLayout& layout() const { return layout_; }
  int num_blocks() const { return num_blocks_; }
  std::size_t num_bytes() const { return layout_.block_bytes * static_cast<std::size_t>(num_blocks_); }

  char* block(int block) { return memory_.data() + layout_.block_bytes * static_cast<std::size_t>(block); }
  const char* block(int block) const { return memory_.data() + layout_.block_bytes * static_cast<std::size_t>(block); }
  const char* head(int layer, int block, int head) const {
    return this->block(block) + layer * layout_.layer_bytes + head * layout_.head_bytes;
  }

  // Store the keys and values of every row of `batch` in the slots its block tables give them. [rows, heads, head_dim].
  void write(int layer, HeadRows keys, HeadRows values, const Batch& batch, ThreadPool& threads);

  // The same for one row.
  void write_row(int layer, const Batch& batch, int row, const HeadRows& keys, const HeadRows& values);

  // Copy all of block `source` over block `target`.
  void copy_block(int source, int target);

 private:
  void quantize_key(char* row, const char* source) const;
  void quantize_value(char* row, const char* source) const;

  KvLayout layout_;
  int num_blocks_;
  const KernelTable& kernels_;
  ZeroedMemory memory_;
};

}  // namespace caudex::kernels
