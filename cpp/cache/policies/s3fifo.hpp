// S3-FIFO: simple, scalable FIFO queues.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cache/ghosts.hpp"
#include "cache/policies/two_lists.hpp"

namespace caudex {

// New blocks enter a small queue of a tenth of the pool, and leave it for the main queue if they were touched twice
// meanwhile, else for good; a memory of what left lets it into the main queue at once if it comes back. The main
// queue gives every touch a second round (J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP
// 2023).
//
// Good for: web-like traffic with many one-shot prompts. Not for: conversations and agents, whose turns come back
// later than the small queue holds them.
class S3FifoPolicy final : public TwoListPolicy {
 public:
  explicit S3FifoPolicy(const PolicyContext& context) : TwoListPolicy(context), ghosts_(context.pool.num_blocks()) {}

  void end_request(const Request& request) override {
    const std::uint64_t place = ++clock_;
    for (NodeId id = request.leaf; !nodes[id].is_root(); id = nodes[id].parent) {
      if (member(id).is_new()) {
        move(id, came_back(id) ? kMain : kSmall, place);
      } else {
        member(id).reuses = static_cast<std::uint8_t>(std::min(member(id).reuses + 1, kMaxReuses));
      }
    }
  }

  Victim victim(std::uint32_t wanted) override {
    for (;;) {
      const bool small = has_leaf(kSmall) && (size(kSmall) * 10 >= pool.num_blocks() || !has_leaf(kMain));
      const NodeId node = front(small ? kSmall : kMain);
      std::uint8_t& reuses = member(node).reuses;
      if (small && reuses > 1) {
        reuses = 0;
        move(node, kMain, ++clock_);
      } else if (!small && reuses > 0) {
        --reuses;
        move(node, kMain, ++clock_);
      } else {
        if (small) remember(node);
        return take(node, small ? 1 : wanted);  // what leaves the main queue does not change the choice
      }
    }
  }

  std::size_t bytes() const override { return TwoListPolicy::bytes() + ghosts_.bytes(); }

 private:
  static constexpr int kSmall = 0, kMain = 1, kMaxReuses = 3;

  bool came_back(NodeId node) {
    bool found = false;
    for_each_fingerprint(node, [&](std::uint64_t fingerprint) { found |= ghosts_.take(fingerprint).has_value(); });
    return found;
  }

  void remember(NodeId node) {
    std::uint64_t fingerprint;
    if (last_fingerprint(node, fingerprint)) ghosts_.add(fingerprint, {});
  }

  struct Nothing {};
  Ghosts<Nothing> ghosts_;
  std::uint64_t clock_ = 0;
};

}  // namespace caudex
