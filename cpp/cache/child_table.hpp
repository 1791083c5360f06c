// Which child of a node goes on with a given label: one table for the whole tree.
#pragma once

#include <cstdint>
#include <utility>

#include "cache/lazy_array.hpp"
#include "cache/types.hpp"

namespace caudex {

// Open addressing with linear probing and backward-shift deletion: no tombstones, so a look-up costs the same after
// a billion insertions and removals, and a node with a million children is no slower than one with two.
//
// Keys are (node, label). A slot holds 32 bits of its key's hash, and the caller looks at the child, whose own line it
// needs next in any case: 8 bytes a slot, 11 to 21 a child.
class ChildTable {
 public:
  ChildTable() : slots_(kSmallest), mask_(kSmallest - 1) {}

  // A child that accept(child) agrees to; it is asked of those with that key, and hardly any other.
  template <typename Accept>
  NodeId find(NodeId parent, std::uint32_t label, Accept accept) const {
    const std::uint32_t tag = tag_of(parent, label);
    for (std::size_t i = tag & mask_; slots_[i].child != kNoNode; i = (i + 1) & mask_) {
      if (slots_[i].tag == tag && accept(slots_[i].child)) return slots_[i].child;
    }
    return kNoNode;
  }

  // Makes room for `count` more entries, so that insert() cannot throw.
  void reserve(std::size_t count) {
    while ((size_ + count) * 4 > slots_.size() * 3) grow();
  }

  void insert(NodeId parent, std::uint32_t label, NodeId child) {
    reserve(1);
    place({tag_of(parent, label), child});
    ++size_;
  }

  // The caller guarantees that it is there.
  void erase(NodeId parent, std::uint32_t label, NodeId child) {
    std::size_t hole = tag_of(parent, label) & mask_;
    while (slots_[hole].child != child) hole = (hole + 1) & mask_;
    --size_;
    for (std::size_t i = (hole + 1) & mask_; slots_[i].child != kNoNode; i = (i + 1) & mask_) {
      const std::size_t distance_from_home = (i - slots_[i].tag) & mask_;
      if (distance_from_home < ((i - hole) & mask_)) continue;
      slots_[hole] = slots_[i];
      hole = i;
    }
    slots_[hole] = Slot();
  }

  std::size_t size() const { return size_; }
  std::size_t bytes() const { return slots_.size() * sizeof(Slot); }

 private:
  struct Slot {
    std::uint32_t tag = 0;  // its low bits are the slot's home
    NodeId child = kNoNode;
  };
  static constexpr std::size_t kSmallest = 64;

  static std::uint32_t tag_of(NodeId parent, std::uint32_t label) {
    std::uint64_t key = (std::uint64_t{parent} << 32) | label;
    key ^= key >> 32;
    key *= 0x9E3779B97F4A7C15u;
    return static_cast<std::uint32_t>(key >> 29);
  }

  void place(const Slot& slot) {
    std::size_t i = slot.tag & mask_;
    while (slots_[i].child != kNoNode) i = (i + 1) & mask_;
    slots_[i] = slot;
  }

  void grow() {
    LazyArray<Slot> old(slots_.size() * 2);
    std::swap(old, slots_);
    mask_ = slots_.size() - 1;
    for (std::size_t i = 0; i < old.size(); ++i) {
      if (old[i].child != kNoNode) place(old[i]);
    }
  }

  LazyArray<Slot> slots_;
  std::size_t mask_;
  std::size_t size_ = 0;
};

}  // namespace caudex
