// The blocks of one node, in order of position.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "cache/types.hpp"

namespace caudex {

// A vector of block ids in 12 bytes. Up to two of them lie in place (most leaves of a busy tree are short), more on the
// heap, behind their capacity. Splitting and joining nodes moves these ids and nothing else.
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
  const BlockId* data() const { return is_in_place() ? place_ : heap() + 1; }
  const BlockId* begin() const { return data(); }
  const BlockId* end() const { return data() + size_; }
  BlockId operator[](std::uint32_t i) const { return data()[i]; }
  BlockId& operator[](std::uint32_t i) { return writable()[i]; }
  BlockId back() const { return data()[size_ - 1]; }
  std::size_t heap_bytes() const { return is_in_place() ? 0 : (1 + capacity()) * sizeof(BlockId); }

  void append(const BlockId* blocks, std::uint32_t count) {
    if (count == 0) return;
    reserve(size_ + count);
    const std::uint32_t size = std::exchange(size_, size_ + count);
    std::memcpy(writable() + size, blocks, count * sizeof(BlockId));
  }

  BlockId pop_back() {
    const BlockId last = back();
    shrink(size_ - 1);
    return last;
  }

  // Takes the first `count` blocks away into a run of their own.
  BlockRun split_front(std::uint32_t count) {
    BlockRun front;
    front.append(data(), count);
    if (size_ > count) std::memmove(writable(), data() + count, (size_ - count) * sizeof(BlockId));
    shrink(size_ - count);
    return front;
  }

 private:
  static constexpr std::uint32_t kInPlace = sizeof(void*) / sizeof(BlockId);

  bool is_in_place() const { return size_ <= kInPlace; }
  BlockId* writable() { return is_in_place() ? place_ : heap() + 1; }
  std::uint32_t capacity() const { return static_cast<std::uint32_t>(heap()[0]); }
  BlockId* heap() const {
    BlockId* pointer;
    std::memcpy(&pointer, place_, sizeof pointer);
    return pointer;
  }

  void swap(BlockRun& other) noexcept {
    std::swap(place_, other.place_);
    std::swap(size_, other.size_);
  }

  void shrink(std::uint32_t size) {
    if (!is_in_place() && size <= kInPlace) {
      BlockId* left = heap();
      std::memcpy(place_, left + 1, size * sizeof(BlockId));
      std::free(left);
    }
    size_ = size;
  }

  // Exact when it first leaves its place (most runs never grow again), half as much more later (a decoding one does).
  // The caller sets the size at once: by it a run is known to lie on the heap.
  void reserve(std::uint32_t wanted) {
    if (wanted <= kInPlace || (!is_in_place() && wanted <= capacity())) return;
    const std::uint32_t room = is_in_place() ? wanted : wanted + wanted / 2;
    auto* grown = static_cast<BlockId*>(std::realloc(is_in_place() ? nullptr : heap(), (1 + room) * sizeof(BlockId)));
    if (grown == nullptr) throw std::bad_alloc();
    if (is_in_place()) std::memcpy(grown + 1, place_, size_ * sizeof(BlockId));
    grown[0] = static_cast<BlockId>(room);
    std::memcpy(place_, &grown, sizeof grown);
  }

  BlockId place_[kInPlace] = {};  // the blocks, or the bytes of a pointer to them
  std::uint32_t size_ = 0;
};

}  // namespace caudex
