// The blocks of one node, in order of position.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "cache/types.hpp"

namespace caudex {

// A vector of block ids in 16 bytes, the first two of them in place: most leaves of a busy tree are short. Splitting and
// joining nodes moves these ids and nothing else.
class BlockRun {
 public:
  BlockRun() = default;
  ~BlockRun() {
    if (!is_in_place()) std::free(heap());
  }
  BlockRun(const BlockRun&) = delete;
  BlockRun& operator=(const BlockRun&) = delete;
  BlockRun(BlockRun&& other) noexcept { swap(other); }
  BlockRun& operator=(BlockRun&& other) noexcept {
    swap(other);
    return *this;
  }

  std::uint32_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const BlockId* data() const { return is_in_place() ? place_ : heap(); }
  const BlockId* begin() const { return data(); }
  const BlockId* end() const { return data() + size_; }
  BlockId operator[](std::uint32_t i) const { return data()[i]; }
  BlockId& operator[](std::uint32_t i) { return writable()[i]; }
  BlockId back() const { return data()[size_ - 1]; }
  std::size_t heap_bytes() const { return is_in_place() ? 0 : capacity_ * sizeof(BlockId); }

  void append(const BlockId* blocks, std::uint32_t count) {
    if (count == 0) return;
    if (size_ + count > capacity_) reserve(size_ + count);
    std::memcpy(writable() + size_, blocks, count * sizeof(BlockId));
    size_ += count;
  }

  BlockId pop_back() { return data()[--size_]; }

  // Takes the first `count` blocks away into a run of their own.
  BlockRun split_front(std::uint32_t count) {
    BlockRun front;
    front.append(data(), count);
    if (size_ > count) std::memmove(writable(), data() + count, (size_ - count) * sizeof(BlockId));
    size_ -= count;
    return front;
  }

 private:
  static constexpr std::uint32_t kInPlace = sizeof(void*) / sizeof(BlockId);

  bool is_in_place() const { return capacity_ == kInPlace; }
  BlockId* writable() { return is_in_place() ? place_ : heap(); }
  BlockId* heap() const {
    BlockId* pointer;
    std::memcpy(&pointer, place_, sizeof pointer);
    return pointer;
  }

  void swap(BlockRun& other) noexcept {
    std::swap(place_, other.place_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

  // Exact when it first leaves its place (most runs never grow again), half as much more later (a decoding one does).
  void reserve(std::uint32_t wanted) {
    const std::uint32_t capacity = is_in_place() ? wanted : wanted + wanted / 2;
    auto* grown = static_cast<BlockId*>(std::realloc(is_in_place() ? nullptr : heap(), capacity * sizeof(BlockId)));
    if (grown == nullptr) throw std::bad_alloc();
    if (is_in_place()) std::memcpy(grown, place_, size_ * sizeof(BlockId));
    std::memcpy(place_, &grown, sizeof grown);
    capacity_ = capacity;
  }

  alignas(void*) BlockId place_[kInPlace] = {};  // the blocks, or the bytes of a pointer to them
  std::uint32_t size_ = 0;
  std::uint32_t capacity_ = kInPlace;
};

}  // namespace caudex
