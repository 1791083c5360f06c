// Time to live.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "cache/policies/ranked.hpp"

namespace caudex {

struct TtlState {
  double expiry = -std::numeric_limits<double>::infinity();  // seconds on the cache's clock
  std::uint64_t last = 0;
  bool operator==(const TtlState& other) const { return expiry == other.expiry && last == other.last; }
};

// Evicts the leaf that expires first, of equals the least recently used. A request keeps its path for the time that
// its caller expects to be away (SessionHints::expected_return), or else for the policy's default; what has not
// expired goes only when all else is gone. What only a finished session (SessionHints::ends) has used goes first.
//
// Good for: agents that know how long their tool call takes. Not for: callers who say nothing, for whom it is LRU.
class TtlPolicy final : public RankedPolicy<TtlState, std::pair<double, std::uint64_t>> {
 public:
  // `seconds` are kept for callers that say nothing.
  TtlPolicy(const PolicyContext& context, double seconds) : RankedPolicy(context), default_(seconds) {}

  void end_request(const Request& request) override {
    const SessionHints& hints = request.hints;
    const double kept = hints.expected_return >= 0.0 ? hints.expected_return : default_;
    for_each_node(request, [&](NodeId, TtlState& state) {
      if (!hints.ends) state.expiry = std::max(state.expiry, request.end_time + kept);
      state.last = request.serial;
    });
  }

 protected:
  std::pair<double, std::uint64_t> key(NodeId node) override { return {state(node).expiry, state(node).last}; }

 private:
  double default_;
};

}  // namespace caudex
