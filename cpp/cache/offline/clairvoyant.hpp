#pragma once

#include <cstdint>
#include <vector>

#include "cache/offline/block_paths.hpp"

namespace caudex::offline {

// When each block is wanted next, for a whole trace: for every request its path as groups of blocks with one next
// use. Built by one pass from the end, in the time that an LRU stack takes.
class NextUses {
 public:
  static constexpr std::uint32_t kNever = UINT32_MAX;

  struct Group {
    std::uint32_t length;    // blocks, following the group before it on the request's path
    std::uint32_t next_use;  // the next request that can be served with these blocks, or kNever
  };

  // Request i can be served its first reusable[i] blocks.
  NextUses(const BlockPaths& log, const std::int64_t* reusable);

  std::int64_t num_requests() const { return static_cast<std::int64_t>(reusable_.size()); }
  std::int64_t reusable(std::int64_t request) const { return reusable_[request]; }

  // The groups of a request's path, root first; next uses do not decrease.
  const Group* begin(std::int64_t request) const { return groups_.data() + first_[request]; }
  const Group* end(std::int64_t request) const { return groups_.data() + last_[request]; }

 private:
  std::vector<Group> groups_;
  std::vector<std::size_t> first_, last_;
  std::vector<std::int64_t> reusable_;
};

// Blocks served to each request by a cache of `capacity` blocks that knows the future: it evicts the block whose next
// use is farthest (L. A. Belady, "A study of replacement algorithms", 1966), of equals the deeper, and never one of
// the running request. This keeps the cache prefix-closed without a rule for it, since a block's parent is wanted no
// later than itself. A request with more than `capacity` full blocks keeps the first `capacity` of them. O(log
// requests) a group.
std::vector<std::int64_t> clairvoyant_hits(const NextUses& uses, std::int64_t capacity);

}  // namespace caudex::offline
