// Priorities that callers give.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "cache/policies/ranked.hpp"

namespace caudex {

struct PriorityState {
  double priority = -std::numeric_limits<double>::infinity();  // the highest of those who touched it
  std::uint64_t last = 0;
  bool operator==(const PriorityState& other) const { return priority == other.priority && last == other.last; }
};

// Evicts the leaf of the lowest priority (SessionHints::priority, 0 unless said otherwise), of equals the least
// recently used. A prefix has the highest priority of those who have used it, as in SGLang's policy of that name.
//
// Good for: paying customers, interactive before batch. Not for: callers who all ask for the highest.
class PriorityPolicy final : public RankedPolicy<PriorityState, std::pair<double, std::uint64_t>> {
 public:
  using RankedPolicy::RankedPolicy;

  void end_request(const Request& request) override {
    for_each_node(request, [&](NodeId, PriorityState& state) {
      state = {std::max(state.priority, request.hints.priority), request.serial};
    });
  }

 protected:
  std::pair<double, std::uint64_t> key(NodeId node) override { return {state(node).priority, state(node).last}; }
};

}  // namespace caudex
