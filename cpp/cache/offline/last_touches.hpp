#pragma once

#include <cstdint>

#include "cache/lazy_array.hpp"
#include "cache/offline/path_tree.hpp"

namespace caudex::offline {

// Which request touched each block last, for a sequence of touched paths.
//
// The blocks that one request touched last are, in every branch, a row of consecutive ones: a *run*. A new path takes
// over the runs that it meets and leaves the rest of the last one:
//
//   before    [ run of request 7 | run of 5       | run of 2 ]     runs of one branch
//             |<------ a new path's stretch ------>|
//   after     [ run of the new request       | 5 | run of 2 ]
//
// So a stretch costs O(1) for each run that it meets. 8 bytes a block, where one has been touched.
class LastTouches {
 public:
  explicit LastTouches(const PathTree& tree) : runs_(tree.num_blocks()) {}

  // Touches a stretch on behalf of `owner`. Calls on_met(owner, depth, length) for what others touched last, the root's
  // side first. A path's stretches are touched in turn, the root's first.
  template <class OnMet>
  void touch(const Stretch& stretch, std::uint32_t owner, OnMet&& on_met) {
    const Block end = stretch.begin + stretch.length;
    for (Block at = stretch.begin; at < end;) {
      const Run met = runs_[at];
      if (met.end == 0) break;  // whoever touches a block of a branch touches those before it
      const Block until = std::min(met.end, end);
      on_met(met.owner, stretch.depth + (at - stretch.begin), until - at);
      if (met.end > end) runs_[end] = met;
      at = until;
    }
    runs_[stretch.begin] = {end, owner};
  }

  // Who touched a block last, or `nobody`. The caller guarantees that it begins a branch or that the block before it
  // has just been touched as the last of a path.
  std::uint32_t owner_of(Block block, std::uint32_t nobody) const {
    return runs_[block].end == 0 ? nobody : runs_[block].owner;
  }

 private:
  struct Run {  // kept at its first block; what lies at others is out of date
    Block end = 0;
    std::uint32_t owner = 0;
  };

  LazyArray<Run> runs_;  // by block
};

}  // namespace caudex::offline
