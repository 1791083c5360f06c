// Adaptive replacement cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cache/ghosts.hpp"
#include "cache/policies/two_lists.hpp"

namespace caudex {

// Two LRU lists, of what was touched once and of what was touched again, and a memory of what left each. A block that
// comes back and was remembered shows which of the lists is too short, and moves the target of the first towards it
// (N. Megiddo, D. S. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003).
//
// Good for: traffic that changes between scans and reuse; a point or two above LRU on most of our traces. Not for:
// agents, whose whole context is touched again at every turn.
class ArcPolicy final : public TwoListPolicy {
 public:
  explicit ArcPolicy(const PolicyContext& context)
      : TwoListPolicy(context), left_once_(context.pool.num_blocks()), left_often_(context.pool.num_blocks()) {}

  void end_request(const Request& request) override {
    for (NodeId id = request.leaf; !nodes[id].is_root(); id = nodes[id].parent) {
      const bool seen = !member(id).is_new() || came_back(id);
      move(id, seen ? kOften : kOnce, request.serial);
    }
  }

  Victim victim(std::uint32_t) override {
    const bool once = has_leaf(kOnce) && (static_cast<double>(size(kOnce)) > target_ || !has_leaf(kOften));
    const NodeId node = front(once ? kOnce : kOften);
    std::uint64_t fingerprint;
    if (last_fingerprint(node, fingerprint)) {
      (once ? left_once_ : left_often_).add(fingerprint, {});
    }
    return take(node);
  }

  std::size_t bytes() const override { return TwoListPolicy::bytes() + left_once_.bytes() + left_often_.bytes(); }

 private:
  static constexpr int kOnce = 0, kOften = 1;
  struct Nothing {};

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

  Ghosts<Nothing> left_once_, left_often_;
  double target_ = 0.0;  // blocks that the first list should have
};

}  // namespace caudex
