// Tail-optimised LRU.
#pragma once

#include <cstdint>
#include <utility>

#include "cache/policies/ranked.hpp"

namespace caudex {

struct TlruState {
  std::uint64_t last = 0;
  Position needed = 0;  // up to here it must be cached for its conversation's next turn to be fast enough
  bool operator==(const TlruState& other) const { return last == other.last && needed == other.needed; }
};

// Evicts first what no conversation needs to answer in time: of each, the last tokens that can be computed again
// within the latency that is allowed. Both kinds go least recently used first (W. Zhang et al., "Tail-optimized
// caching for LLM inference", arXiv 2510.15152, 2025).
//
// Good for: holding a bound on the slowest first tokens. Not for: the highest hit rate.
class TlruPolicy final : public RankedPolicy<TlruState, std::pair<bool, std::uint64_t>> {
 public:
  // `tokens` can be computed within the latency allowed, the next turn's own prompt apart.
  TlruPolicy(const PolicyContext& context, double tokens) : RankedPolicy(context), spare_(tokens / tokens_per_id) {}

  void end_request(const Request& request) override {
    const double needed = static_cast<double>(request.num_tokens) - spare_;
    const TlruState touched{request.serial, needed > 0.0 ? static_cast<Position>(needed) : 0};
    for_each_node(request, [&](NodeId, TlruState& state) { state = touched; });
  }

 protected:
  std::pair<bool, std::uint64_t> key(NodeId node) override {
    const TlruState& known = state(node);
    return {nodes[node].end <= known.needed, known.last};
  }

  std::uint32_t steady(NodeId) const override { return 1; }

 private:
  double spare_;
};

}  // namespace caudex
