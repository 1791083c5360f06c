// A bounded memory of what has been evicted.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "cache/lazy_array.hpp"

namespace caudex {

// The last `window` evicted fingerprints with a value each, first in, first out. O(1); 16 to 24 bytes an entry and the
// value.
//
// Used by the cache to count thrash, and by policies that learn from what came back.
template <typename Value>
class Ghosts {
 public:
  // The table has at least `slots` places an entry, at 4 bytes each: the more, the fewer are looked at.
  explicit Ghosts(std::size_t window, double slots = 4.0 / 3.0)
      : slots_(slots),
        ring_(window),
        values_(window),
        mask_(table_size(window, slots) - 1),
        table_(window ? mask_ + 1 : 1) {}

  // Forgets the oldest entry when full, and returns its value. A fingerprint that is there already keeps its age, and
  // the value that it had is returned.
  std::optional<Value> add(std::uint64_t fingerprint, const Value& value) {
    if (ring_.size() == 0) return std::nullopt;
    const std::uint32_t known = table_[locate(fingerprint)];
    if (known != 0) return std::exchange(values_[known - 1].value, value);
    std::optional<Value> forgotten;
    if (values_[next_].live) {
      forgotten = values_[next_].value;
      unindex(static_cast<std::uint32_t>(next_));
    }
    if (next_ + kAhead < ring_.size()) prefetch(ring_[next_ + kAhead]);
    ring_[next_] = fingerprint;
    values_[next_] = {value, true};
    index(static_cast<std::uint32_t>(next_));
    num_ever_used_ = num_ever_used_ > next_ ? num_ever_used_ : next_ + 1;
    next_ = next_ + 1 == ring_.size() ? 0 : next_ + 1;
    return forgotten;
  }

  const Value* find(std::uint64_t fingerprint) const {
    const std::uint32_t place = ring_.size() == 0 ? 0 : table_[locate(fingerprint)];
    return place == 0 ? nullptr : &values_[place - 1].value;
  }

  // Forgets it, and returns its value if it was there.
  std::optional<Value> take(std::uint64_t fingerprint) {
    const std::uint32_t place = ring_.size() == 0 ? 0 : table_[locate(fingerprint)];
    if (place == 0) return std::nullopt;
    unindex(place - 1);
    values_[place - 1].live = false;
    return values_[place - 1].value;
  }

  // Says that this fingerprint will be asked for soon: the table is large, and every look into it a cache miss.
  void prefetch(std::uint64_t fingerprint) const { __builtin_prefetch(&table_[home(fingerprint)]); }

  std::size_t bytes() const {
    const std::size_t per_entry = sizeof(std::uint64_t) + sizeof(Entry);
    return num_ever_used_ * per_entry + (num_ever_used_ > 0 ? table_.size() * sizeof(std::uint32_t) : 0);
  }

  void clear() { *this = Ghosts(ring_.size(), slots_); }

  std::size_t size() const { return size_; }  // how many are remembered

 private:
  static constexpr std::size_t kAhead = 8;

  struct Entry {
    Value value;
    bool live;
  };

  static std::size_t table_size(std::size_t window, double slots) {
    std::size_t size = 16;
    while (static_cast<double>(size) < static_cast<double>(window) * slots) size *= 2;
    return size;
  }
  std::size_t home(std::uint64_t fingerprint) const { return (fingerprint * 0x9E3779B97F4A7C15u >> 20) & mask_; }

  // Where the table points to it, or the empty place where it would.
  std::size_t locate(std::uint64_t fingerprint) const {
    std::size_t i = home(fingerprint);
    while (table_[i] != 0 && ring_[table_[i] - 1] != fingerprint) i = (i + 1) & mask_;
    return i;
  }

  void index(std::uint32_t entry) {
    table_[locate(ring_[entry])] = entry + 1;
    ++size_;
  }

  void unindex(std::uint32_t entry) {
    std::size_t hole = home(ring_[entry]);
    while (table_[hole] != entry + 1) hole = (hole + 1) & mask_;
    for (std::size_t i = (hole + 1) & mask_; table_[i] != 0; i = (i + 1) & mask_) {
      std::size_t distance_from_home = (i - home(ring_[table_[i] - 1])) & mask_;
      if (distance_from_home < ((i - hole) & mask_)) continue;
      table_[hole] = table_[i];
      hole = i;
    }
    table_[hole] = 0;
    --size_;
  }

  double slots_;
  LazyArray<std::uint64_t> ring_;
  LazyArray<Entry> values_;
  std::size_t mask_;
  LazyArray<std::uint32_t> table_;  // entry + 1, 0 when empty
  std::size_t next_ = 0;
  std::size_t num_ever_used_ = 0;
  std::size_t size_ = 0;
};

}  // namespace caudex
