// Greedy-Dual-Size-Frequency.
#pragma once

#include <cstdint>
#include <utility>

#include "cache/policies/ranked.hpp"

namespace caudex {

struct GdsfState {
  std::uint32_t touches = 0;
  std::uint64_t last = 0;
  double floor = 0.0;  // the policy's floor when it was last touched
  bool operator==(const GdsfState& other) const {
    return touches == other.touches && last == other.last && floor == other.floor;
  }
};

// Evicts the leaf that saves the least computing: its value is floor + touches x cost, where the cost of a token
// grows with its depth, since it attends to all before it, and the floor rises to the value of whatever is evicted,
// which ages what is not touched (L. Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency
// caching", 1998).
//
// Good for: long documents beside short chats. Not for: agents, whose long tails it keeps for too long.
class GdsfPolicy final : public RankedPolicy<GdsfState, std::pair<double, std::uint64_t>> {
 public:
  // At a depth of `break_even` tokens, attention costs as much as everything else (30,000 for Llama-3.1-8B).
  GdsfPolicy(const PolicyContext& context, double break_even) : RankedPolicy(context), break_even_(break_even) {}

  void end_request(const Request& request) override {
    for_each_node(request, [&](NodeId, GdsfState& state) { state = {state.touches + 1, request.serial, floor_}; });
  }

  Victim victim(std::uint32_t wanted) override {
    const Victim victim = RankedPolicy::victim(wanted);
    floor_ = key(victim.node).first;
    return victim;
  }

 protected:
  std::pair<double, std::uint64_t> key(NodeId node) override {
    const GdsfState& known = state(node);
    const double cost = 1.0 + nodes[node].end * tokens_per_id / break_even_;
    return {known.floor + known.touches * cost, known.last};
  }

  std::uint32_t steady(NodeId) const override { return 1; }

 private:
  double break_even_;
  double floor_ = 0.0;
};

}  // namespace caudex
