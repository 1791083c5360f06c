#pragma once

#include <cstdint>
#include <vector>

namespace caudex::offline {

// Open-addressed map from a block id to a 32-bit handle: linear probing, at most half full, erased without
// tombstones. All operations are O(1) expected; 16 bytes a slot.
class IdMap {
 public:
  static constexpr std::uint32_t kNone = UINT32_MAX;

  IdMap() : slots_(16) {}

  std::uint32_t find(std::int64_t key) const { return slots_[locate(key)].value; }

  void insert(std::int64_t key, std::uint32_t value) {
    if (2 * (size_ + 1) > slots_.size()) grow();
    Slot& slot = slots_[locate(key)];
    size_ += slot.value == kNone;
    slot = {key, value};
  }

  // Does nothing if the key is absent. Later slots of the probe sequence move up, so that no gap hides them.
  void erase(std::int64_t key) {
    std::size_t gap = locate(key);
    if (slots_[gap].value == kNone) return;
    --size_;
    for (std::size_t next = step(gap); slots_[next].value != kNone; next = step(next)) {
      const std::size_t home = mix(slots_[next].key) & mask();
      if (((next - home) & mask()) < ((next - gap) & mask())) continue;
      slots_[gap] = slots_[next];
      gap = next;
    }
    slots_[gap].value = kNone;
  }

  std::size_t size() const { return size_; }

 private:
  struct Slot {
    std::int64_t key = 0;
    std::uint32_t value = kNone;
  };

  // The finaliser of MurmurHash3.
  static std::uint64_t mix(std::int64_t key) {
    auto x = static_cast<std::uint64_t>(key);
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
    return x ^ (x >> 33);
  }

  std::size_t mask() const { return slots_.size() - 1; }
  std::size_t step(std::size_t slot) const { return (slot + 1) & mask(); }

  std::size_t locate(std::int64_t key) const {
    std::size_t slot = mix(key) & mask();
    while (slots_[slot].value != kNone && slots_[slot].key != key) slot = step(slot);
    return slot;
  }

  void grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.value != kNone) slots_[locate(slot.key)] = slot;
    }
  }

  std::vector<Slot> slots_;
  std::size_t size_ = 0;
};

}  // namespace caudex::offline
