// Least recently used, tail first.
#pragma once

#include <algorithm>

#include "cache/policy.hpp"

namespace caudex {

// Evicts the leaf that has been unpinned longest; within one request's path, the block farthest from the root.
//
// All unpinned nodes stand in one list by the time they were last unpinned. A request's path is unpinned leaf first,
// so a node always stands behind its descendants and the front of the list is a leaf: O(1), with no search.
//
// Good for: anything, as the baseline. Not for: scans of one-shot prompts, which push out what is shared.
class LruPolicy final : public Policy {
 public:
  using Policy::Policy;

  void end_request(const Request&) override {}

  void offer(NodeId node) override {
    if (slot(links_, node).is_linked()) return;
    insert_before(kNoNode, node);
  }

  void withdraw(NodeId node) override {
    Link& link = slot(links_, node);
    if (!link.is_linked()) return;
    links_[link.previous].next = link.next;
    links_[link.next].previous = link.previous;
    link = Link{};
  }

  void split(NodeId upper, NodeId lower) override {
    if (slot(links_, lower).is_linked()) insert_before(links_[lower].next, upper);
  }

  // Neighbours in the list may become one: the order of eviction stays the same.
  bool merge(NodeId upper, NodeId lower) override { return slot(links_, lower).next == upper; }

  Victim victim(std::uint32_t wanted) override { return whole(links_[kNoNode].next, wanted); }

  std::size_t bytes() const override { return links_.capacity() * sizeof(Link); }

 private:
  static constexpr NodeId kNowhere = UINT32_MAX;

  struct Link {
    NodeId previous = kNowhere;
    NodeId next = kNowhere;
    bool is_linked() const { return next != kNowhere; }
  };

  // The list is a ring through slot kNoNode: its `next` is the oldest node, its `previous` the youngest.
  void insert_before(NodeId next, NodeId node) {
    slot(links_, std::max(next, node));
    NodeId previous = links_[next].previous;
    links_[node].previous = previous;
    links_[node].next = next;
    links_[previous].next = node;
    links_[next].previous = node;
  }

  std::vector<Link> links_ = std::vector<Link>(1, Link{kNoNode, kNoNode});
};

}  // namespace caudex
