// What changed in the cache, for those who follow it from outside.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/types.hpp"

namespace caudex {

// Whole blocks became matchable, or were evicted. Blocks are named by the first 64 bits of their keys.
struct CacheEvent {
  enum class Kind { kStored, kRemoved, kCleared };
  Kind kind = Kind::kCleared;
  std::vector<std::uint64_t> blocks;
  bool has_parent = false;  // kStored: the first block's parent, unless it begins the prompt
  std::uint64_t parent = 0;
  std::vector<Token> tokens;
  SpaceId space = 0;
};

// Collects events until somebody takes them. Chains of stored blocks and runs of removed ones become one event each.
//
// Bounded: should nobody take them for long, the log empties itself and says kCleared first, which is the truth from
// which a follower can start anew.
class EventLog {
 public:
  void enable(std::size_t max_blocks) {
    max_blocks_ = max_blocks;
  }
  bool is_enabled() const { return max_blocks_ > 0; }

  void stored(SpaceId space, bool has_parent, std::uint64_t parent, std::uint64_t block, const Token* tokens,
              std::uint32_t count) {
    if (!make_room()) return;
    const bool goes_on = !events_.empty() && events_.back().kind == CacheEvent::Kind::kStored && has_parent &&
                         events_.back().blocks.back() == parent;
    if (!goes_on) events_.push_back({CacheEvent::Kind::kStored, {}, has_parent, parent, {}, space});
    events_.back().blocks.push_back(block);
    events_.back().tokens.insert(events_.back().tokens.end(), tokens, tokens + count);
  }

  void removed(SpaceId space, std::uint64_t block) {
    if (!make_room()) return;
    if (events_.empty() || events_.back().kind != CacheEvent::Kind::kRemoved || events_.back().space != space) {
      events_.push_back({CacheEvent::Kind::kRemoved, {}, false, 0, {}, space});
    }
    events_.back().blocks.push_back(block);
  }

  void cleared() {
    if (!is_enabled()) return;
    events_.assign(1, CacheEvent{});
    num_blocks_ = 0;
  }

  // The namespaces of events that nobody has taken yet.
  template <typename Visit>
  void for_each_space(Visit visit) const {
    for (const CacheEvent& event : events_) {
      if (event.kind != CacheEvent::Kind::kCleared) visit(event.space);
    }
  }

  std::vector<CacheEvent> take() {
    std::vector<CacheEvent> taken;
    taken.swap(events_);
    num_blocks_ = 0;
    return taken;
  }

 private:
  bool make_room() {
    if (!is_enabled()) return false;
    if (++num_blocks_ > max_blocks_) cleared();
    return true;
  }

  std::size_t max_blocks_ = 0;
  std::size_t num_blocks_ = 0;
  std::vector<CacheEvent> events_;
};

}  // namespace caudex
