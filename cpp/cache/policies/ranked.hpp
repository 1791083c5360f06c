// The common part of policies that evict the leaf of the lowest rank.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "cache/policy.hpp"

namespace caudex {

// Keeps a State of every node, and the unpinned leaves in the order of their keys: O(log leaves) a node offered or
// withdrawn, O(1) a victim. A policy says what a request does to the states of its path, and how a state ranks.
//
// State is copyable, default-made for a node that nobody has touched, and comparable: nodes with equal states may
// merge.
template <typename State, typename Key>
class RankedPolicy : public Policy {
 public:
  using Policy::Policy;

  void offer(NodeId node) override {
    if (!nodes[node].is_leaf()) return;
    const Key current = key(node);
    const auto old = leaves_.find({slot(keys_, node), node});
    if (old != leaves_.end()) {
      if (current == keys_[node]) return;
      leaves_.erase(old);
    }
    keys_[node] = current;
    leaves_.emplace(current, node);
  }

  void withdraw(NodeId node) override {
    if (node == shortened_) shortened_ = kNoNode;
    leaves_.erase({slot(keys_, node), node});
    if (!nodes[node].is_pinned()) state(node) = State{};
  }

  void split(NodeId upper, NodeId lower) override {
    state(std::max(upper, lower));
    states_[upper] = states_[lower];
  }

  bool merge(NodeId upper, NodeId lower) override {
    state(std::max(upper, lower));
    return states_[upper] == states_[lower];
  }

  Victim victim(std::uint32_t wanted) override {
    if (shortened_ != kNoNode) offer(shortened_);  // it ranks by what is left of it
    shortened_ = leaves_.begin()->second;
    return whole(shortened_, std::min(wanted, steady(shortened_)));
  }

  std::size_t bytes() const override {
    return states_.capacity() * sizeof(State) + keys_.capacity() * sizeof(Key) + leaves_.size() * (sizeof(Key) + 40);
  }

 protected:
  virtual Key key(NodeId node) = 0;

  // How many of its last blocks a leaf may lose, one at least, before its key may have changed: all, where the key does
  // not look at them.
  virtual std::uint32_t steady(NodeId) const { return UINT32_MAX; }

  State& state(NodeId node) { return slot(states_, node); }

  // Calls visit(node, state) for each node of the request's path, the leaf first.
  template <typename Visit>
  void for_each_node(const Request& request, Visit visit) {
    for (NodeId id = request.leaf; !nodes[id].is_root(); id = nodes[id].parent) visit(id, state(id));
  }

 private:
  std::vector<State> states_;  // by node
  std::vector<Key> keys_;      // by node, of those in leaves_
  std::set<std::pair<Key, NodeId>> leaves_;
  NodeId shortened_ = kNoNode;  // the last victim, while it is still there
};

}  // namespace caudex
