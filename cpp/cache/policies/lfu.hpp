// Least frequently used.
#pragma once

#include <cstdint>
#include <utility>

#include "cache/policies/ranked.hpp"

namespace caudex {

struct LfuState {
  std::uint32_t touches = 0;  // requests that went through, since it was cached
  std::uint64_t last = 0;     // the latest of them
  bool operator==(const LfuState& other) const { return touches == other.touches && last == other.last; }
};

// Evicts the leaf that the fewest requests have touched since it was cached, of equals the one touched longest ago
// (in-cache LFU; A. V. Aho, P. J. Denning, J. D. Ullman, "Principles of optimal page replacement", 1971).
//
// Good for: a few prompts that stay popular. Not for: conversations, whose last turn is always the least used, and
// traffic that drifts, since what was popular never ages.
class LfuPolicy final : public RankedPolicy<LfuState, std::pair<std::uint32_t, std::uint64_t>> {
 public:
  using RankedPolicy::RankedPolicy;

  void end_request(const Request& request) override {
    for_each_node(request, [&](NodeId, LfuState& state) { state = {state.touches + 1, request.serial}; });
  }

 protected:
  std::pair<std::uint32_t, std::uint64_t> key(NodeId node) override { return {state(node).touches, state(node).last}; }
};

}  // namespace caudex
