// The prefix cache: requests, their blocks, and what is kept of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache/block_pool.hpp"
#include "cache/block_tree.hpp"
#include "cache/ghosts.hpp"
#include "cache/hashing.hpp"
#include "cache/sequence.hpp"
#include "cache/stats.hpp"

namespace caudex {

struct CacheOptions {
  std::uint32_t num_blocks = 0;
  std::uint32_t block_size = 16;
  Grain grain = Grain::kToken;
  std::string policy = "lru";
  std::string hash = "fold64";
  std::uint64_t secret = 0;
  std::uint32_t thrash_window = 0;  // evicted blocks that are remembered
};

// What a look-up finds. Nothing is pinned or touched by it.
struct Match {
  Position num_tokens = 0;  // at most one less than asked: the last token's logits are always needed
  Position num_whole = 0;   // of them, in whole blocks
  std::vector<BlockId> blocks;
  BlockId partial_block = kNoBlock;  // holds the rest, num_tokens - num_whole, in its first slots
};

// Not thread-safe: the caller holds one lock around every call, as the Python face does.
//
// Each call either does all it says or throws and changes nothing. Every block of the pool is exactly one of
//   free, cached (in the tree, evictable), pinned (in the tree under a running request, or private to one).
class PrefixCache {
 public:
  explicit PrefixCache(const CacheOptions& options);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  Match match(const Token* tokens, std::size_t count, const std::string& space) const;

  // Looks up the longest cached prefix and pins it. The caller keeps `sequence` where it is until release().
  void begin(Sequence& sequence, const Token* tokens, std::size_t count, const std::string& space);
  // The same for a request that goes on after a preemption; its look-up is counted apart.
  void resume(Sequence& sequence, const Token* tokens, std::size_t count, const std::string& space);

  // Slots for the first `num_tokens` tokens. Evicts as needed; throws OutOfBlocks if that cannot be enough.
  std::vector<BlockCopy> allocate(Sequence& sequence, std::size_t num_tokens);
  void append(Sequence& sequence, const Token* tokens, std::size_t count);
  // One decoded token and its slot for each of these requests: all or none.
  std::vector<BlockCopy> append_and_allocate(const std::vector<Sequence*>& sequences, const Token* tokens);
  // The KV of the first `num_tokens` tokens has been written: it can be matched from now on.
  void commit(Sequence& sequence, std::size_t num_tokens);
  void commit_all(const std::vector<Sequence*>& sequences);
  // `child` begins as a copy of what `parent` has committed. Takes one block if that ends inside a block.
  void fork(const Sequence& parent, Sequence& child);
  // Unpins. What is committed stays cached, the rest of the blocks is free.
  void release(Sequence& sequence);

  // Evicts all that is not pinned.
  void clear();

  std::uint32_t num_blocks() const { return pool_.num_blocks(); }
  std::uint32_t block_size() const { return pool_.block_size(); }
  std::uint32_t num_free() const { return pool_.num_free(); }
  std::uint32_t num_cached() const { return tree_.num_cached(); }
  std::uint32_t num_pinned() const { return num_blocks() - num_free() - num_cached(); }
  std::uint32_t num_available() const { return num_free() + num_cached(); }
  std::uint32_t num_nodes() const { return tree_.nodes().count(); }

  Stats stats() const;
  Stats stats(const std::string& space) const;
  std::vector<std::string> spaces() const;

  // Seconds on the clock that policies see. The caller sets it: wall time when serving, the trace's in a replay.
  void set_time(double seconds) { now_ = seconds; }

  void check_invariants() const;
  std::string dump() const { return tree_.dump(); }
  std::size_t bytes() const;

 private:
  struct Space {
    std::string name;
    NodeId root;
    Stats stats;
  };

  const Space* find_space(const std::string& name) const;
  SpaceId open_space(const std::string& name);
  Walk look_up(NodeId root, const Token* tokens, std::size_t count) const;
  void require_committable(const Sequence& sequence, std::size_t num_tokens) const;
  void start(Sequence& sequence, const Token* tokens, std::size_t count, const std::string& space);
  void enlist(Sequence& sequence);
  void store(Sequence& sequence);
  void adopt(Sequence& sequence, const Walk& walk);
  void keep(Sequence& sequence, const Walk& walk, Position end);
  void write_tokens(const Sequence& sequence, Position from, Position end);
  BlockId take_block();
  std::uint32_t blocks_for(std::size_t num_tokens) const {
    return static_cast<std::uint32_t>((num_tokens + block_size() - 1) / block_size());
  }
  void require_blocks(std::uint64_t count) const;

  std::unique_ptr<BlockHasher> hasher_;
  BlockPool pool_;
  BlockTree tree_;
  std::vector<Space> spaces_;
  std::unordered_map<std::string, SpaceId> space_ids_;
  Ghosts<double> evicted_;
  std::vector<BlockCopy> pending_copies_;  // from fork(), handed out by the next allocation of any request
  Sequence* running_ = nullptr;
  std::uint64_t num_begun_ = 0;
  std::uint64_t num_batches_ = 0;
  double now_ = 0.0;
};

}  // namespace caudex
