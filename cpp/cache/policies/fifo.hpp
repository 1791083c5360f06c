// First in, first out.
#pragma once

#include <algorithm>
#include <set>
#include <utility>

#include "cache/policy.hpp"

namespace caudex {

// Evicts the leaf whose blocks were first cached longest ago, however often they were used since. O(log leaves).
//
// Good for: a baseline that shows what recency is worth. Not for: serving.
class FifoPolicy final : public Policy {
 public:
  using Policy::Policy;

  void end_request(const Request& request) override {
    for (NodeId id = request.leaf; !nodes[id].is_root(); id = nodes[id].parent) {
      std::uint64_t& born = slot(born_, id);
      if (born == 0) born = request.serial;
    }
  }

  void offer(NodeId node) override {
    if (nodes[node].is_leaf()) leaves_.emplace(slot(born_, node), node);
  }

  void withdraw(NodeId node) override {
    leaves_.erase({slot(born_, node), node});
    if (!nodes[node].is_pinned()) born_[node] = 0;
  }

  void split(NodeId upper, NodeId lower) override {
    slot(born_, std::max(upper, lower));
    born_[upper] = born_[lower];
  }

  bool merge(NodeId upper, NodeId lower) override {
    slot(born_, std::max(upper, lower));
    return born_[upper] == born_[lower];
  }

  Victim victim(std::uint32_t wanted) override { return whole(leaves_.begin()->second, wanted); }

  std::size_t bytes() const override { return born_.capacity() * 8 + leaves_.size() * 48; }

 private:
  std::vector<std::uint64_t> born_;  // by node: the request that first cached it, 0 when new
  std::set<std::pair<std::uint64_t, NodeId>> leaves_;
};

}  // namespace caudex
