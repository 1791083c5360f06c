// A bounded memory of what has been evicted.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cache/lazy_array.hpp"

namespace caudex {

// The last `window` evicted fingerprints with a value each, first in, first out. O(1); 16 bytes an entry and the value.
//
// Used by the cache to count thrash, and by policies that learn from what came back.
template <typename Value>
class Ghosts {
 public:
  explicit Ghosts(std::size_t window) : ring_(window), mask_(table_size(window) - 1), table_(window ? mask_ + 1 : 1) {}

  // Forgets the oldest entry when full, and returns its value. A fingerprint that is there already gets the new value
  // and age.
  std::optional<Value> add(std::uint64_t fingerprint, const Value& value) {
    if (ring_.size() == 0) return std::nullopt;
    take(fingerprint);
    Entry& entry = ring_[next_];
    std::optional<Value> forgotten;
    if (entry.live) {
      forgotten = entry.value;
      unindex(static_cast<std::uint32_t>(next_));
    }
    entry = Entry{fingerprint, value, true};
    index(static_cast<std::uint32_t>(next_));
    next_ = next_ + 1 == ring_.size() ? 0 : next_ + 1;
    return forgotten;
  }

  const Value* find(std::uint64_t fingerprint) const {
    if (ring_.size() == 0) return nullptr;
    for (std::size_t i = home(fingerprint); table_[i] != 0; i = (i + 1) & mask_) {
      if (ring_[table_[i] - 1].fingerprint == fingerprint) return &ring_[table_[i] - 1].value;
    }
    return nullptr;
  }

  // Forgets it; true if it was there.
  bool take(std::uint64_t fingerprint) {
    const Value* value = find(fingerprint);
    if (value == nullptr) return false;
    std::size_t i = home(fingerprint);
    while (ring_[table_[i] - 1].fingerprint != fingerprint) i = (i + 1) & mask_;
    std::uint32_t entry = table_[i] - 1;
    unindex(entry);
    ring_[entry].live = false;
    return true;
  }

  void clear() { *this = Ghosts(ring_.size()); }

 private:
  struct Entry {
    std::uint64_t fingerprint;
    Value value;
    bool live;
  };

  static std::size_t table_size(std::size_t window) {
    std::size_t size = 16;
    while (size < window * 2) size *= 2;
    return size;
  }
  std::size_t home(std::uint64_t fingerprint) const { return (fingerprint * 0x9E3779B97F4A7C15u >> 20) & mask_; }

  void index(std::uint32_t entry) {
    std::size_t i = home(ring_[entry].fingerprint);
    while (table_[i] != 0) i = (i + 1) & mask_;
    table_[i] = entry + 1;
  }

  void unindex(std::uint32_t entry) {
    std::size_t hole = home(ring_[entry].fingerprint);
    while (table_[hole] != entry + 1) hole = (hole + 1) & mask_;
    for (std::size_t i = (hole + 1) & mask_; table_[i] != 0; i = (i + 1) & mask_) {
      std::size_t distance_from_home = (i - home(ring_[table_[i] - 1].fingerprint)) & mask_;
      if (distance_from_home < ((i - hole) & mask_)) continue;
      table_[hole] = table_[i];
      hole = i;
    }
    table_[hole] = 0;
  }

  LazyArray<Entry> ring_;
  std::size_t mask_;
  LazyArray<std::uint32_t> table_;  // entry + 1, 0 when empty
  std::size_t next_ = 0;
};

}  // namespace caudex
