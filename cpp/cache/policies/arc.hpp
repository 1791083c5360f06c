// Adaptive replacement cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cache/ghost_list.hpp"
#include "cache/policies/two_lists.hpp"

namespace caudex {

// Two LRU lists, of what was touched once and of what was touched again, and a memory of what left each. A block that
// comes back and was remembered shows which of the lists is too short, and moves the target of the first towards it
// (N. Megiddo, D. S. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003).
//
// As in the paper, with c for the pool's blocks: the first list and its memory are at most c blocks together, all four
// at most 2c. Otherwise than there, a request makes room before it is known what comes back, so the target moves after
// its evictions, and the new blocks of a request go to one list together: to the second if any of them comes back.
//
// Good for: traffic that changes between scans and reuse; a point or two above LRU on most of our traces. Not for:
// agents, whose whole context is touched again at every turn.
class ArcPolicy final : public TwoListPolicy {
 public:
  using TwoListPolicy::TwoListPolicy;

  void end_request(const Request& request) override {
    for (NodeId id = request.leaf; !nodes[id].is_root(); id = nodes[id].parent) {
      const bool seen = !member(id).is_new() || came_back(id);
      move(id, seen ? kOften : kOnce, request.serial);
    }
    forget_beyond_bounds();
  }

  Victim victim(std::uint32_t) override {
    const bool once = has_leaf(kOnce) && (static_cast<double>(size(kOnce)) > target_ || !has_leaf(kOften));
    const Victim victim = take(front(once ? kOnce : kOften), 1);
    std::uint64_t fingerprint;
    if (last_fingerprint(victim.node, fingerprint)) (once ? left_once_ : left_often_).add(fingerprint);
    forget_beyond_bounds();
    return victim;
  }

  std::size_t bytes() const override { return TwoListPolicy::bytes() + left_once_.bytes() + left_often_.bytes(); }

 private:
  static constexpr int kOnce = 0, kOften = 1;

  bool came_back(NodeId node) {
    bool found = false;
    for_each_fingerprint(node, [&](std::uint64_t fingerprint) {
      const double once = std::max<double>(left_once_.size(), 1.0), often = std::max<double>(left_often_.size(), 1.0);
      if (left_once_.take(fingerprint)) {
        target_ = std::min<double>(target_ + std::max(often / once, 1.0), pool.num_blocks());
        found = true;
      } else if (left_often_.take(fingerprint)) {
        target_ = std::max(target_ - std::max(once / often, 1.0), 0.0);
        found = true;
      }
    });
    return found;
  }

  void forget_beyond_bounds() {
    const std::uint64_t capacity = pool.num_blocks();
    while (left_once_.size() > 0 && size(kOnce) + left_once_.size() > capacity) left_once_.forget_oldest();
    const std::uint64_t others = size(kOnce) + left_once_.size() + size(kOften);
    while (left_often_.size() > 0 && others + left_often_.size() > 2 * capacity) left_often_.forget_oldest();
  }

  GhostList left_once_, left_often_;
  double target_ = 0.0;  // blocks that the first list should have
};

}  // namespace caudex
