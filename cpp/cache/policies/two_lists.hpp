// The common part of policies that keep two lists.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "cache/policy.hpp"

namespace caudex {

// Every node stands in one of two lists, at a place of its own choosing; lists are measured in blocks, and their
// unpinned leaves are kept in order of place. O(log leaves) a move, O(1) for the front of a list.
class TwoListPolicy : public Policy {
 public:
  using Policy::Policy;

  void offer(NodeId node) override {
    if (!nodes[node].is_leaf()) return;
    Member& member = slot(members_, node);
    if (member.blocks == 0) move(node, 0, 0);
    leaves_[member.list].emplace(member.place, node);
  }

  void withdraw(NodeId node) override {
    Member& member = slot(members_, node);
    leaves_[member.list].erase({member.place, node});
    if (nodes[node].is_pinned()) return;
    sizes_[member.list] -= member.blocks;
    member = Member{};
  }

  void split(NodeId upper, NodeId lower) override {
    slot(members_, std::max(upper, lower));
    Member& below = members_[lower];
    Member& above = members_[upper];
    if (below.blocks == 0) return;
    above = below;
    above.blocks = std::min(below.blocks, nodes[upper].blocks.size());
    below.blocks -= above.blocks;
  }

  bool merge(NodeId upper, NodeId lower) override {
    slot(members_, std::max(upper, lower));
    Member& above = members_[upper];
    Member& below = members_[lower];
    if (above.list != below.list || above.place != below.place || above.reuses != below.reuses) return false;
    below.blocks += std::exchange(above.blocks, 0);
    return true;
  }

  std::size_t bytes() const override {
    return members_.capacity() * sizeof(Member) + (leaves_[0].size() + leaves_[1].size()) * 56;
  }

 protected:
  struct Member {
    std::uint64_t place = 0;   // the lower, the nearer the front
    std::uint32_t blocks = 0;  // as counted in the list's size; 0 for a node that is new
    std::uint8_t list = 0;
    std::uint8_t reuses = 0;
    bool is_new() const { return blocks == 0; }
  };

  Member& member(NodeId node) { return slot(members_, node); }
  std::uint64_t size(int list) const { return sizes_[list]; }
  bool has_leaf(int list) const { return !leaves_[list].empty(); }
  NodeId front(int list) const { return leaves_[list].begin()->second; }

  // Puts a node in a list, counting the blocks that it has now.
  void move(NodeId node, int list, std::uint64_t place) {
    Member& member = slot(members_, node);
    const bool is_candidate = leaves_[member.list].erase({member.place, node}) > 0;
    sizes_[member.list] -= member.blocks;
    member.list = static_cast<std::uint8_t>(list);
    member.place = place;
    member.blocks = nodes[node].blocks.size();
    sizes_[list] += member.blocks;
    if (is_candidate) leaves_[list].emplace(place, node);
  }

  // The node is chosen: it loses so many of its last blocks, or all it has.
  Victim take(NodeId node, std::uint32_t wanted) {
    const Victim victim = whole(node, wanted);
    Member& member = members_[node];
    const std::uint32_t counted = std::min(member.blocks, victim.num_blocks);
    member.blocks -= counted;
    sizes_[member.list] -= counted;
    return victim;
  }

  // The fingerprint of the node's last block; false if that block is not full.
  bool last_fingerprint(NodeId id, std::uint64_t& fingerprint) const {
    const Node& node = nodes[id];
    const Position border = (node.start / pool.block_size() + node.blocks.size()) * pool.block_size();
    if (border > node.end) return false;
    fingerprint = pool.fingerprint(node.blocks.back());
    return true;
  }

  // Calls visit(fingerprint) for each full block of the node.
  template <typename Visit>
  void for_each_fingerprint(NodeId id, Visit visit) const {
    const Node& node = nodes[id];
    Position border = node.start - node.start % pool.block_size();
    for (BlockId block : node.blocks) {
      border += pool.block_size();
      if (border <= node.end) visit(pool.fingerprint(block));
    }
  }

 private:
  std::vector<Member> members_;  // by node
  std::array<std::set<std::pair<std::uint64_t, NodeId>>, 2> leaves_;
  std::array<std::uint64_t, 2> sizes_{};
};

}  // namespace caudex
