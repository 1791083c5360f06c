#pragma once

#include <cstdint>
#include <vector>

#include "cache/offline/block_paths.hpp"

namespace caudex::offline {

// Hits as a function of capacity: piecewise linear, 0 at capacity 0, a slope of slopes[k] hits a block of capacity
// from capacities[k] to capacities[k + 1] (and 0 after the last).
struct Knots {
  std::vector<std::int64_t> capacities;
  std::vector<std::int64_t> hits;  // blocks served from the cache, at each of `capacities`
};

// The stack distances of one group's hits.
class DistanceHistogram {
 public:
  // Hits at the distances first .. first + count - 1, one each.
  void add(std::int64_t first, std::int64_t count) {
    if (turns_.size() >= fold_at_) fold();
    const auto rise = static_cast<std::uint64_t>(first - 1);
    turns_.push_back(rise << 1);
    turns_.push_back((rise + static_cast<std::uint64_t>(count)) << 1 | 1);
  }

  Knots knots();

 private:
  struct Step {
    std::int64_t capacity;
    std::int64_t slope;  // change of the curve's slope from this capacity on
  };

  void fold();  // sorts the turns into the steps, so that memory is bounded by the distinct distances

  std::vector<Step> steps_;           // by capacity
  std::vector<std::uint64_t> turns_;  // twice the capacity from which the slope is one more; plus one: one less
  std::size_t fold_at_ = std::size_t{1} << 17;
};

// The exact hits of an LRU cache (tail first, running request protected) at every capacity, from one pass over the
// log. Request i can be served its first reusable[i] blocks and belongs to groups[i], below num_groups; null puts all
// in group 0. The groups share the cache, and their hits are told apart.
std::vector<Knots> hit_curves(const BlockPaths& log, const std::int64_t* reusable, const std::int32_t* groups,
                              std::size_t num_groups);

}  // namespace caudex::offline
