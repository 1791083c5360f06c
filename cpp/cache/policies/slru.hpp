// Segmented LRU.
#pragma once

#include <cstdint>
#include <set>
#include <utility>

#include "cache/policies/two_lists.hpp"

namespace caudex {

// Two LRU lists: what was touched once is on probation and goes first, what was touched again is protected. Beyond 80
// % of the pool, the protected list's least recently used go back on probation, behind what is there (R. Karedla, J.
// S. Love, B. G. Wherry, "Caching strategies to improve disk system performance", 1994).
//
// Good for: shared documents amid one-shot prompts. Not for: conversations, whose new turns are all on probation.
class SlruPolicy final : public TwoListPolicy {
 public:
  using TwoListPolicy::TwoListPolicy;

  void end_request(const Request& request) override {
    const std::uint64_t place = ++clock_;
    for (NodeId id = request.leaf; !nodes[id].is_root(); id = nodes[id].parent) {
      leave_protected(id);
      move(id, member(id).is_new() ? kProbation : kProtected, place);
      if (member(id).list == kProtected) protected_.emplace(place, id);
    }
    while (size(kProtected) > pool.num_blocks() * kProtectedShare && !protected_.empty()) demote();
  }

  void withdraw(NodeId node) override {
    if (!nodes[node].is_pinned()) leave_protected(node);
    TwoListPolicy::withdraw(node);
  }

  void split(NodeId upper, NodeId lower) override {
    TwoListPolicy::split(upper, lower);
    if (protected_.count({member(lower).place, lower}) > 0) protected_.emplace(member(upper).place, upper);
  }

  Victim victim(std::uint32_t wanted) override {
    return take(front(has_leaf(kProbation) ? kProbation : kProtected), wanted);
  }

 private:
  static constexpr int kProbation = 0, kProtected = 1;
  static constexpr double kProtectedShare = 0.8;

  void leave_protected(NodeId node) { protected_.erase({member(node).place, node}); }

  // What one request touched last goes back together, behind all that is on probation.
  void demote() {
    const std::uint64_t place = protected_.begin()->first;
    ++clock_;
    while (!protected_.empty() && protected_.begin()->first == place) {
      const NodeId node = protected_.begin()->second;
      leave_protected(node);
      move(node, kProbation, clock_);
    }
  }

  std::set<std::pair<std::uint64_t, NodeId>> protected_;  // all of them, leaves or not, by place
  std::uint64_t clock_ = 0;
};

}  // namespace caudex
