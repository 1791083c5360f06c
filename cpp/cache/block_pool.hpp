// The pool: which blocks are free, and what each block in use holds.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "cache/lazy_array.hpp"
#include "cache/types.hpp"

namespace caudex {

// A block is a fixed number of token slots. The tokens of block b lie together at tokens(b), one cache line at block
// size 16, and its key (a chained hash of all tokens up to the block's end) at key(b).
//
// take() and give() are O(1). Blocks are handed out in ascending order until the pool has been used once, so that
// prompts lie contiguously in memory; after that, the last one returned goes first.
class BlockPool {
 public:
  BlockPool(std::uint32_t num_blocks, std::uint32_t block_size, std::uint32_t key_bytes)
      : num_blocks_(num_blocks),
        block_size_(block_size),
        key_bytes_(key_bytes),
        tokens_(std::size_t{num_blocks} * block_size),
        keys_(std::size_t{num_blocks} * key_bytes) {}

  std::uint32_t num_blocks() const { return num_blocks_; }
  std::uint32_t block_size() const { return block_size_; }
  std::uint32_t key_bytes() const { return key_bytes_; }
  std::uint32_t num_free() const { return num_returned_ + (num_blocks_ - num_ever_used_); }

  // The caller guarantees num_free() > 0.
  BlockId take() {
    if (num_returned_ == 0) return static_cast<BlockId>(num_ever_used_++);
    --num_returned_;
    return std::exchange(last_returned_, *tokens(last_returned_));
  }

  // The caller guarantees that nothing refers to the block any more.
  void give(BlockId block) {
    *tokens(block) = std::exchange(last_returned_, block);
    ++num_returned_;
  }

  Token* tokens(BlockId block) { return tokens_.data() + std::size_t(block) * block_size_; }
  const Token* tokens(BlockId block) const { return tokens_.data() + std::size_t(block) * block_size_; }

  std::uint8_t* key(BlockId block) { return keys_.data() + std::size_t(block) * key_bytes_; }
  const std::uint8_t* key(BlockId block) const { return keys_.data() + std::size_t(block) * key_bytes_; }

  // The first 64 bits of the key. Only a block whose slots are all written has one.
  std::uint64_t fingerprint(BlockId block) const {
    std::uint64_t value;
    std::memcpy(&value, key(block), sizeof value);
    return value;
  }

  // The tokens and the key of one block, into another.
  void copy(BlockId source, BlockId destination) {
    std::memcpy(tokens(destination), tokens(source), block_size_ * sizeof(Token));
    std::memcpy(key(destination), key(source), key_bytes_);
  }

  // Makes the pool that large; all blocks are free but those marked in `used`, which has one byte a block.
  void resize(std::uint32_t num_blocks, const std::vector<std::uint8_t>& used) {
    const std::size_t kept = num_blocks < num_blocks_ ? num_blocks : num_blocks_;
    LazyArray<Token> tokens = tokens_.resized(std::size_t{num_blocks} * block_size_, kept * block_size_);
    LazyArray<std::uint8_t> keys = keys_.resized(std::size_t{num_blocks} * key_bytes_, kept * key_bytes_);
    std::uint32_t num_ever_used = num_blocks;
    while (num_ever_used > 0 && !used[num_ever_used - 1]) --num_ever_used;
    tokens_ = std::move(tokens);
    keys_ = std::move(keys);
    num_blocks_ = num_blocks;
    num_ever_used_ = num_ever_used;
    num_returned_ = 0;
    for (std::uint32_t b = num_ever_used; b-- > 0;) {
      if (!used[b]) give(static_cast<BlockId>(b));
    }
  }

  // Calls visit(block) for every free block, in no order. For checks.
  template <typename Visit>
  void for_each_free(Visit visit) const {
    BlockId block = last_returned_;
    for (std::uint32_t i = 0; i < num_returned_; ++i, block = *tokens(block)) visit(block);
    for (std::uint32_t b = num_ever_used_; b < num_blocks_; ++b) visit(static_cast<BlockId>(b));
  }

  // Bytes of a block in these arrays, used or not.
  std::size_t bytes_per_block() const { return block_size_ * sizeof(Token) + key_bytes_; }

 private:
  std::uint32_t num_blocks_;
  std::uint32_t block_size_;
  std::uint32_t key_bytes_;
  std::uint32_t num_ever_used_ = 0;  // blocks from here on were never handed out
  std::uint32_t num_returned_ = 0;
  BlockId last_returned_ = kNoBlock;  // each returned block's first slot says which one was returned before
  LazyArray<Token> tokens_;
  LazyArray<std::uint8_t> keys_;
};

}  // namespace caudex
