#pragma once

#include <cstdint>
#include <vector>

#include "cache/offline/block_trace.hpp"
#include "cache/offline/lru_stack.hpp"

namespace caudex::offline {

// Hits as a function of capacity: piecewise linear, 0 at capacity 0, a slope of slopes[k] hits a block of capacity
// from capacities[k] to capacities[k + 1] (and 0 after the last).
struct Knots {
  std::vector<std::int64_t> capacities;
  std::vector<std::int64_t> hits;  // blocks served from the cache, at each of `capacities`
};

// Collects, for one group of requests, the stack distances of their hits.
class DistanceHistogram {
 public:
  // Hits at the distances first .. first + count - 1, one each.
  void add(std::int64_t first, std::int64_t count) {
    if (steps_.size() >= fold_at_) fold();
    steps_.push_back({first - 1, 1});
    steps_.push_back({first - 1 + count, -1});
  }

  Knots knots();

 private:
  struct Step {
    std::int64_t capacity;
    std::int64_t slope;  // change of the curve's slope from this capacity on
  };

  void fold();  // sorts the steps and merges equal capacities, so memory is bounded by the distinct distances

  std::vector<Step> steps_;
  std::size_t fold_at_ = std::size_t{1} << 16;
};

// The exact token hit rate of an LRU cache (tail first, running request protected) at every capacity, in one pass.
// Requests may come in chunks; each belongs to one of `num_groups` groups, whose hits are told apart while all share
// the cache.
class HitCurve {
 public:
  explicit HitCurve(std::size_t num_groups) : groups_(num_groups) {}

  // `groups` gives each request's group, below num_groups; null puts all in group 0.
  void add(const BlockTrace& trace, const std::int32_t* groups);

  Knots knots(std::size_t group) { return groups_[group].knots(); }
  std::int64_t num_distinct_blocks() const { return stack_.size(); }

 private:
  LruStack stack_;
  std::vector<DistanceHistogram> groups_;
};

}  // namespace caudex::offline
