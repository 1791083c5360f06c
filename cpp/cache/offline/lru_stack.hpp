#pragma once

#include <cstdint>
#include <vector>

#include "cache/offline/last_touches.hpp"

namespace caudex::offline {

// The LRU stack of a tail-first cache: who was touched later is nearer the top, and of one request's blocks the one
// nearer the root. A block's distance is its position, from 1; an LRU cache of C blocks holds the top C (R. L.
// Mattson et al., "Evaluation techniques for storage hierarchies", 1970). A touched path costs O(1) for each stretch
// and run on it, and O(log requests) for each earlier request that it takes blocks from. 8 bytes a block, 4 a request.
class LruStack {
 public:
  LruStack(const PathTree& tree, std::uint32_t num_requests) : touches_(tree), counts_(num_requests + 1) {}

  // Moves the path of the next request to the top. Calls on_hit(distance, depth, length) for each group of `length`
  // blocks from `depth` on that lay at distances distance .. distance + length - 1.
  template <class OnHit>
  void touch(const std::vector<Stretch>& path, OnHit&& on_hit) {
    const std::uint32_t request = next_++;
    if (path.empty()) return;
    Group group;
    const auto take = [&] {
      if (group.length == 0) return;
      const std::uint32_t above = total_ - up_to(group.owner);
      on_hit(std::int64_t{above} + group.depth + 1, group.depth, group.length);
      add(group.owner, 0u - group.length);
    };
    for (const Stretch& stretch : path) {
      touches_.touch(stretch, request, [&](std::uint32_t owner, std::uint32_t depth, std::uint32_t length) {
        if (owner == group.owner && group.length > 0) {
          group.length += length;
          return;
        }
        take();
        group = {owner, depth, length};
      });
    }
    take();
    add(request, path.back().depth + path.back().length);
  }

 private:
  struct Group {
    std::uint32_t owner = 0;
    std::uint32_t depth = 0;
    std::uint32_t length = 0;
  };

  // A Fenwick tree over the requests: how many blocks each was the last to touch. Sums are below 2^32, as blocks are,
  // so that what wraps around on the way comes out right.
  void add(std::uint32_t request, std::uint32_t count) {
    total_ += count;
    for (std::size_t at = request + 1; at < counts_.size(); at += at & (~at + 1)) counts_[at] += count;
  }

  std::uint32_t up_to(std::uint32_t request) const {
    std::uint32_t sum = 0;
    for (std::size_t at = request + 1; at > 0; at -= at & (~at + 1)) sum += counts_[at];
    return sum;
  }

  LastTouches touches_;
  std::vector<std::uint32_t> counts_;
  std::uint32_t total_ = 0;
  std::uint32_t next_ = 0;
};

}  // namespace caudex::offline
