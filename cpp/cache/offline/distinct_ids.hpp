#pragma once

#include <cstdint>
#include <vector>

#include "cache/offline/path_tree_builder.hpp"

namespace caudex::offline {

// How many different ids the blocks of a hash trace have. Where ids are chained there are as many as blocks; an id that
// occurs behind two different paths makes two blocks. 8 bytes a block, and 5 to 11 an id.
class DistinctIds {
 public:
  using Id = std::int64_t;

  DistinctIds() : slots_(64) {}

  // The caller guarantees no more than 4 billion distinct blocks in all.
  void add(const Id* path, std::size_t length) {
    const Block before = builder_.tree().num_blocks();
    builder_.add(path, length, 0, 0);
    for (Block block = before; block < builder_.tree().num_blocks(); ++block) insert(block);
  }

  std::uint32_t num_blocks() const { return builder_.tree().num_blocks(); }
  std::uint32_t num_ids() const { return size_; }

 private:
  std::size_t home(Id id) const {
    std::uint64_t x = static_cast<std::uint64_t>(id) * 0x9E3779B97F4A7C15u;
    return (x ^ (x >> 32)) & (slots_.size() - 1);
  }

  void insert(Block block) {
    if (4 * std::size_t{size_} >= 3 * slots_.size()) grow();
    const Id id = builder_.symbols()[block];
    std::size_t i = home(id);
    for (; slots_[i] != 0; i = (i + 1) & (slots_.size() - 1)) {
      if (builder_.symbols()[slots_[i] - 1] == id) return;
    }
    slots_[i] = block + 1;
    ++size_;
  }

  void grow() {
    std::vector<std::uint32_t> old(2 * slots_.size());
    old.swap(slots_);
    for (std::uint32_t kept : old) {
      if (kept == 0) continue;
      std::size_t i = home(builder_.symbols()[kept - 1]);
      while (slots_[i] != 0) i = (i + 1) & (slots_.size() - 1);
      slots_[i] = kept;
    }
  }

  PathTreeBuilder<Id> builder_;
  std::vector<std::uint32_t> slots_;  // a block with that id, and 1; 0 when empty
  std::uint32_t size_ = 0;
};

}  // namespace caudex::offline
