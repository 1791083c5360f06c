// Which child of a node continues with a given token: one table for the whole tree.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/types.hpp"

namespace caudex {

// Open addressing with linear probing and backward-shift deletion: no tombstones, so a look-up costs the same after
// a billion insertions and removals, and a node with a million children is no slower than one with two.
//
// Keys are 64 bits: (node, token) in the radix index, exact; the block's chained hash in the hash index, where two
// children may have the same one and the caller tells them apart.
class ChildTable {
 public:
  ChildTable() : slots_(kSmallest), mask_(kSmallest - 1) {}

  // The child with that key which accept(child) agrees to.
  template <typename Accept>
  NodeId find(std::uint64_t key, Accept accept) const {
    for (std::size_t i = home(key); slots_[i].child != kNoNode; i = (i + 1) & mask_) {
      if (slots_[i].key() == key && accept(slots_[i].child)) return slots_[i].child;
    }
    return kNoNode;
  }

  // Makes room for `count` more entries, so that insert() cannot throw.
  void reserve(std::size_t count) {
    while ((size_ + count) * 4 > slots_.size() * 3) grow();
  }

  void insert(std::uint64_t key, NodeId child) {
    reserve(1);
    std::size_t i = home(key);
    while (slots_[i].child != kNoNode) i = (i + 1) & mask_;
    slots_[i] = Slot(key, child);
    ++size_;
  }

  // The caller guarantees that it is there.
  void erase(std::uint64_t key, NodeId child) {
    std::size_t hole = home(key);
    while (slots_[hole].child != child) hole = (hole + 1) & mask_;
    --size_;
    for (std::size_t i = (hole + 1) & mask_; slots_[i].child != kNoNode; i = (i + 1) & mask_) {
      std::size_t distance_from_home = (i - home(slots_[i].key())) & mask_;
      if (distance_from_home < ((i - hole) & mask_)) continue;
      slots_[hole] = slots_[i];
      hole = i;
    }
    slots_[hole] = Slot();
  }

  std::size_t size() const { return size_; }
  std::size_t bytes() const { return slots_.size() * sizeof(Slot); }

 private:
  struct Slot {  // 12 bytes: the key is kept as halves so that it needs no padding
    std::uint32_t low = 0, high = 0;
    NodeId child = kNoNode;

    Slot() = default;
    Slot(std::uint64_t key, NodeId child)
        : low(static_cast<std::uint32_t>(key)), high(static_cast<std::uint32_t>(key >> 32)), child(child) {}
    std::uint64_t key() const { return (std::uint64_t{high} << 32) | low; }
  };
  static constexpr std::size_t kSmallest = 64;

  std::size_t home(std::uint64_t key) const {
    key ^= key >> 32;
    key *= 0x9E3779B97F4A7C15u;
    key ^= key >> 29;
    return key & mask_;
  }

  void grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    mask_ = slots_.size() - 1;
    for (const Slot& slot : old) {
      if (slot.child == kNoNode) continue;
      std::size_t i = home(slot.key());
      while (slots_[i].child != kNoNode) i = (i + 1) & mask_;
      slots_[i] = slot;
    }
  }

  std::vector<Slot> slots_;
  std::size_t mask_;
  std::size_t size_ = 0;
};

}  // namespace caudex
