#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "routing/chain_keys.hpp"

namespace caudex::routing {

/// Which worker holds which blocks, as the workers' own KV events tell it.
///
/// Engines name a block by a hash of their own (seeded per process, by an algorithm of their choice). The directory
/// never compares such hashes across workers: each event carries the block's tokens and its parent's hash, from which
/// the block's chain key is worked out here, so that no seed has to agree. Blocks may be removed in any order.
///
/// A match costs one table probe a block plus one step a (block, holder). Not thread-safe.
class BlockDirectory {
 public:
  using Worker = std::uint32_t;
  using EngineHash = std::uint64_t;

  explicit BlockDirectory(std::size_t block_size);

  /// A worker stored `num_blocks` consecutive blocks below the block whose key is `parent`.
  void store(Worker worker, Key parent, const EngineHash* hashes, std::size_t num_blocks, const std::int32_t* tokens);

  /// The key of a block that the worker stored, or false if it is unknown (its event was missed).
  bool find(Worker worker, EngineHash hash, Key* key) const;

  void remove(Worker worker, const EngineHash* hashes, std::size_t num_blocks);
  void clear(Worker worker);

  /// Writes, for each worker below `num_workers`, how many leading blocks of `keys` it holds.
  void match(const Key* keys, std::size_t num_keys, std::int32_t* out, std::size_t num_workers) const;

  std::size_t num_blocks(Worker worker) const;

  /// Writes the number of blocks held by each worker below `num_workers`.
  void held(std::int64_t* out, std::size_t num_workers) const;

  std::size_t block_size() const { return block_size_; }

 private:
  void drop_holder(Key key, Worker worker);

  std::size_t block_size_;
  std::unordered_map<Key, std::vector<Worker>> holders_;
  std::vector<std::unordered_map<EngineHash, Key>> by_hash_;  // by worker
};

}  // namespace caudex::routing
