// vLLM's KV cache manager, rule by rule: to predict its hits, not to serve with.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "cache/hashing.hpp"
#include "cache/types.hpp"

namespace caudex::parity {

// A request in vLLM's manager.
struct VllmRequest {
  std::vector<Token> tokens;
  std::vector<std::array<std::uint64_t, 2>> keys;  // of its whole blocks, as far as computed
  std::vector<BlockId> blocks;
  std::vector<BlockId> hits;  // found at the look-up, taken by the first allocation
  std::uint32_t num_registered = 0;
  bool running = false;
};

// The rules of version 0.32 for one group of full-attention layers:
//   * a look-up finds whole blocks only, at most length - 1 tokens, and neither pins nor touches them;
//   * the first allocation takes the hits out of the free queue; it fails as a whole if they and the new blocks together
//     are more than the queue holds;
//   * new blocks come from the queue's front, and forget what they held;
//   * a block is registered under its chained hash when it is allocated, full, before its KV is written; equal blocks are
//     all kept, and a look-up returns the one that was registered first;
//   * a finished request's blocks are freed last first: registered ones go to the queue's end, others to its front;
//   * block 0 is set aside, so a pool of n blocks holds n - 1.
class VllmCache {
 public:
  VllmCache(std::uint32_t num_blocks, std::uint32_t block_size);

  // Looks up the tokens; returns how many are cached.
  Position begin(VllmRequest& request, const Token* tokens, std::size_t count);
  // Slots for the first `num_tokens` tokens. Throws OutOfBlocks and changes nothing.
  void allocate(VllmRequest& request, std::size_t num_tokens);
  void append(VllmRequest& request, const Token* tokens, std::size_t count);
  void release(VllmRequest& request);
  // Forgets all that is cached, if no request runs; else does nothing and says so. The queue keeps its order.
  bool reset();

  // The free queue, from the block that is taken next.
  std::vector<BlockId> eviction_order() const;
  std::uint32_t num_free() const { return num_free_; }  // blocks in the queue, cached or not
  std::uint32_t block_size() const { return block_size_; }
  std::uint64_t num_evicted() const { return num_evicted_; }

 private:
  using Key = std::array<std::uint64_t, 2>;
  struct KeyHash {
    std::size_t operator()(const Key& key) const { return key[0]; }
  };
  struct Block {
    std::uint32_t references = 0;
    bool is_registered = false;
    bool is_queued = false;
    Key key{};
    BlockId previous = 0;
    BlockId next = 0;
  };

  void compute_keys(VllmRequest& request);
  void insert_after(BlockId place, BlockId block);
  void unlink(BlockId block);
  BlockId take();
  void forget(BlockId block);

  std::uint32_t block_size_;
  std::unique_ptr<BlockHasher> hasher_;
  std::vector<Block> blocks_;  // block 0 is the ring's anchor: its `next` is the queue's front
  std::unordered_map<Key, std::vector<BlockId>, KeyHash> registered_;
  std::uint32_t num_free_ = 0;
  std::uint64_t num_evicted_ = 0;
};

}  // namespace caudex::parity
