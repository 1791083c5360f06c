// A bounded memory of what has been evicted, a run of blocks at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "cache/lazy_array.hpp"

namespace caudex {

// The last `window` evicted blocks, first in, first out. Blocks that went one after another from the end of one path
// are a *run* with one value. What is remembered of a block is 32 bits of its fingerprint; only a run's first block, the
// one nearest the root, stands in a table. That is enough, since a path is walked from the root, and whatever is
// evicted of it is a suffix: blocks are looked up in the order of their path, beginning with the first that is missing.
//
//     ring      ... | c5 c4 c3 | h2 h1 h0 | .. .. d7 | free          each block's parent to its right
//     runs          |   one    |   one    |   one    |               `..`: taken, in place until overwritten
//     table            c3         h0         d7       -> run
//
// 4 bytes a block; 20 to 40 a run. O(1) a run, and a comparison a block.
//
// Two blocks are taken for each other with a chance of 2^-64 where a run begins, of 2^-32 where the front of a run has
// been taken, or within it.
template <typename Value>
class GhostRuns {
 public:
  // Leading blocks of a look-up that are remembered as one run.
  struct Found {
    std::uint32_t count = 0;
    Value value{};
  };

  explicit GhostRuns(std::size_t window) : ring_(window), runs_(1), table_(kSmallest) {}

  // Blocks evicted one after another, each the parent of the one before. Calls forget(value, count) for the oldest ones
  // that have to make room.
  template <typename Forget>
  void add(const std::uint64_t* fingerprints, std::uint32_t count, const Value& value, Forget forget) {
    if (!reserve(fingerprints, count, value, forget)) return;
    if (num_runs() == runs_.size()) grow_runs();
    runs_[last_++ & (runs_.size() - 1)] = Run{next_, 0, 0, 0, value};
    lengthen(fingerprints, count);
  }

  // The newest run's value, if all of it is left: for a caller that goes on evicting where it has stopped.
  const Value* newest() const {
    if (num_runs() == 0 || run(last_ - 1).live < run(last_ - 1).span) return nullptr;
    return &run(last_ - 1).value;
  }

  // add() to the newest run, which the caller guarantees is all left and continued by these blocks.
  template <typename Forget>
  void extend(const std::uint64_t* fingerprints, std::uint32_t count, Forget forget) {
    const Value value = run(last_ - 1).value;
    if (!reserve(fingerprints, count, value, forget)) return;
    if (num_runs() == 0) return add(fingerprints, count, value, forget);  // it had to make room itself
    unindex(last_ - 1);
    lengthen(fingerprints, count);
  }

  // How many of these blocks, each the parent of the next, are remembered as one run.
  Found find(const std::uint64_t* fingerprints, std::uint32_t count) const {
    const std::optional<std::uint32_t> id = count == 0 ? std::nullopt : locate(fingerprints[0]);
    if (!id) return {};
    const Run& run = this->run(*id);
    std::uint32_t place = front_place(run), equal = 1;
    for (const std::uint32_t most = std::min(count, run.live); equal < most; ++equal) {
      place = (place == 0 ? window() : place) - 1;
      if (ring_[place] != lower(fingerprints[equal])) break;
    }
    return {equal, run.value};
  }

  // The same, and forgets those.
  Found take(const std::uint64_t* fingerprints, std::uint32_t count) {
    const std::optional<std::uint32_t> id = count == 0 ? std::nullopt : locate(fingerprints[0]);
    if (!id) return {};
    const Found found = find(fingerprints, count);
    unindex(*id);
    Run& run = this->run(*id);
    run.live -= found.count;
    run.upper = 0;  // of the block that is the first now, only the lower half is known
    if (run.live > 0) index(*id);
    return found;
  }

  void clear() { *this = GhostRuns(ring_.size()); }

  std::size_t bytes() const {
    return num_ever_used_ * sizeof(std::uint32_t) + runs_.capacity() * sizeof(Run) + table_.capacity() * sizeof(Slot);
  }

 private:
  struct Run {
    std::uint32_t begin = 0;  // its place in the ring: the block that was evicted first
    std::uint32_t span = 0;   // places
    std::uint32_t live = 0;   // of them, from `begin` on; what follows has been taken
    std::uint32_t upper = 0;  // of the first block's fingerprint, 0 if unknown
    Value value{};
  };
  struct Slot {
    std::uint32_t lower = 0;
    std::uint32_t tag = 0;  // of a run, 0 when empty

    std::uint32_t run() const { return tag >> 1; }
  };
  static constexpr std::size_t kSmallest = 16;

  // Numbers of runs wrap around, in the table at 31 bits: there are never so many at once.
  static std::uint32_t tag_of(std::uint32_t id) { return id << 1 | 1; }

  static std::uint32_t lower(std::uint64_t fingerprint) { return static_cast<std::uint32_t>(fingerprint); }
  static std::uint32_t upper(std::uint64_t fingerprint) { return static_cast<std::uint32_t>(fingerprint >> 32); }
  std::uint32_t window() const { return static_cast<std::uint32_t>(ring_.size()); }
  std::uint32_t num_runs() const { return last_ - first_; }
  Run& run(std::uint32_t id) { return runs_[id & (runs_.size() - 1)]; }
  const Run& run(std::uint32_t id) const { return runs_[id & (runs_.size() - 1)]; }
  std::uint32_t front_place(const Run& run) const {
    return static_cast<std::uint32_t>((std::uint64_t{run.begin} + run.live - 1) % window());
  }

  // Forgets the oldest until there is room, and of a run longer than the window what would be forgotten at once.
  // False if nothing is left to add.
  template <typename Forget>
  bool reserve(const std::uint64_t*& fingerprints, std::uint32_t& count, const Value& value, Forget forget) {
    if (count > window()) {
      make_room(window(), forget);
      const std::uint32_t excess = count - window();
      forget(value, excess);
      fingerprints += excess;
      count -= excess;
    }
    make_room(count, forget);
    return count > 0;
  }

  template <typename Forget>
  void make_room(std::uint32_t count, Forget forget) {
    while (std::uint64_t{used_} + count > window()) {
      Run& oldest = run(first_);
      const std::uint32_t gone = std::min(oldest.span, used_ + count - window());
      const std::uint32_t lost = std::min(oldest.live, gone);
      if (lost > 0 && lost == oldest.live) unindex(first_);
      oldest.live -= lost;
      oldest.span -= gone;
      oldest.begin = static_cast<std::uint32_t>((std::uint64_t{oldest.begin} + gone) % window());
      used_ -= gone;
      if (oldest.span == 0) ++first_;
      if (lost > 0) forget(Value(oldest.value), lost);
    }
  }

  // Adds blocks to the newest run, which is in no table.
  void lengthen(const std::uint64_t* fingerprints, std::uint32_t count) {
    Run& newest = run(last_ - 1);
    for (std::uint32_t i = 0; i < count; ++i) {
      ring_[next_] = lower(fingerprints[i]);
      num_ever_used_ = std::max(num_ever_used_, ++next_);
      if (next_ == window()) next_ = 0;
    }
    newest.span += count;
    newest.live += count;
    newest.upper = upper(fingerprints[count - 1]);
    used_ += count;
    index(last_ - 1);
  }

  std::size_t home(std::uint32_t key) const {
    return static_cast<std::size_t>(key * 0x9E3779B97F4A7C15u >> 24) & (table_.size() - 1);
  }

  std::optional<std::uint32_t> locate(std::uint64_t fingerprint) const {
    for (std::size_t i = home(lower(fingerprint)); table_[i].tag != 0; i = (i + 1) & (table_.size() - 1)) {
      if (table_[i].lower != lower(fingerprint)) continue;
      const std::uint32_t known = run(table_[i].run()).upper;
      if (known == 0 || known == upper(fingerprint)) return table_[i].run();
    }
    return std::nullopt;
  }

  void index(std::uint32_t id) {
    if (++num_indexed_ * 4 > table_.size() * 3) grow_table();
    insert({ring_[front_place(run(id))], tag_of(id)});
  }

  void insert(const Slot& slot) {
    std::size_t i = home(slot.lower);
    while (table_[i].tag != 0) i = (i + 1) & (table_.size() - 1);
    table_[i] = slot;
  }

  void unindex(std::uint32_t id) {
    const std::size_t mask = table_.size() - 1;
    std::size_t hole = home(ring_[front_place(run(id))]);
    while (table_[hole].tag != tag_of(id)) hole = (hole + 1) & mask;
    for (std::size_t i = (hole + 1) & mask; table_[i].tag != 0; i = (i + 1) & mask) {
      if (((i - home(table_[i].lower)) & mask) < ((i - hole) & mask)) continue;
      table_[hole] = table_[i];
      hole = i;
    }
    table_[hole] = Slot{};
    --num_indexed_;
  }

  void grow_table() {
    std::vector<Slot> old(table_.size() * 2);
    old.swap(table_);
    for (const Slot& slot : old) {
      if (slot.tag != 0) insert(slot);
    }
  }

  void grow_runs() {
    std::vector<Run> grown(runs_.size() * 2);
    for (std::uint32_t id = first_; id != last_; ++id) grown[id & (grown.size() - 1)] = run(id);
    runs_.swap(grown);
  }

  LazyArray<std::uint32_t> ring_;  // lower halves of fingerprints
  std::vector<Run> runs_;          // those from first_ to last_, by number
  std::vector<Slot> table_;        // runs of which something is left
  std::uint32_t first_ = 0, last_ = 0;
  std::uint32_t next_ = 0;           // the place that is written next
  std::uint32_t used_ = 0;           // places of runs
  std::uint32_t num_ever_used_ = 0;  // places
  std::size_t num_indexed_ = 0;
};

}  // namespace caudex
