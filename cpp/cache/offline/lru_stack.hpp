#pragma once

#include <cstdint>
#include <vector>

#include "cache/offline/touch_runs.hpp"

namespace caudex::offline {

// The LRU stack of a tail-first cache: who was touched later is nearer the top, and of one request's blocks the one
// nearer the root. A block's distance is its position, from 1; an LRU cache of C blocks holds the top C (R. L.
// Mattson et al., "Evaluation techniques for storage hierarchies", 1970). A touched path costs O(runs met x log live
// runs) beyond the stream of comparing its ids.
class LruStack {
 public:
  // Moves a path of n blocks to the top. Calls on_hit(distance, depth, length) for each group of `length` blocks from
  // `depth` on that lay at distances distance .. distance + length - 1. Returns how many blocks were never touched
  // before.
  template <class OnHit>
  std::size_t touch(const ChainedId* path, std::size_t n, OnHit&& on_hit) {
    if (n == 0) return 0;
    if (next_slot_ + 1 >= tree_.size()) renumber();
    std::size_t known = 0;
    const auto on_cut = [&](Handle run, std::size_t depth, std::size_t length) {
      const std::uint64_t slot = runs_[run].owner;
      on_hit(total_ - prefix(slot) + static_cast<std::int64_t>(depth) + 1, depth, length);
      add(slot, -static_cast<std::int64_t>(length));
      if (runs_[run].size() == length) run_at_[slot] = TouchRuns::kNone;
      known = depth + length;
    };
    const std::uint64_t slot = ++next_slot_;
    const Handle fresh = runs_.touch(path, n, slot, on_cut, [&](Handle run) { drop(run); });
    run_at_[slot] = fresh;
    add(slot, static_cast<std::int64_t>(n));
    return n - known;
  }

  // Blocks on the stack.
  std::int64_t size() const { return total_; }

 private:
  using Handle = TouchRuns::Handle;

  void drop(Handle run) {
    add(runs_[run].owner, -static_cast<std::int64_t>(runs_[run].size()));
    run_at_[runs_[run].owner] = TouchRuns::kNone;
  }

  // A Fenwick tree over slots 1 .. tree_.size() - 1: the number of blocks in each request's run, oldest request
  // first.
  void add(std::size_t slot, std::int64_t count) {
    total_ += count;
    for (; slot < tree_.size(); slot += slot & (~slot + 1)) tree_[slot] += count;
  }

  std::int64_t prefix(std::size_t slot) const {
    std::int64_t sum = 0;
    for (; slot > 0; slot -= slot & (~slot + 1)) sum += tree_[slot];
    return sum;
  }

  // Gives the live runs the slots 1, 2, ... in their order, with room for as many again: amortised O(log) a request.
  void renumber() {
    std::vector<Handle> live;
    for (std::size_t slot = 1; slot <= next_slot_; ++slot) {
      if (run_at_[slot] != TouchRuns::kNone) live.push_back(run_at_[slot]);
    }
    std::size_t capacity = 64;
    while (capacity < 2 * (live.size() + 2)) capacity *= 2;
    tree_.assign(capacity, 0);
    run_at_.assign(capacity, TouchRuns::kNone);
    total_ = 0;
    next_slot_ = live.size();
    for (std::size_t i = 0; i < live.size(); ++i) {
      runs_[live[i]].owner = i + 1;
      run_at_[i + 1] = live[i];
      add(i + 1, static_cast<std::int64_t>(runs_[live[i]].size()));
    }
  }

  TouchRuns runs_;
  std::vector<std::int64_t> tree_;
  std::vector<Handle> run_at_;
  std::size_t next_slot_ = 0;
  std::int64_t total_ = 0;
};

}  // namespace caudex::offline
