// The blocks of one node, in order of position.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "cache/types.hpp"

namespace caudex {

// A vector of block ids in 16 bytes. Splitting and joining nodes moves these ids and nothing else.
class BlockRun {
 public:
  BlockRun() = default;
  ~BlockRun() { std::free(data_); }
  BlockRun(const BlockRun&) = delete;
  BlockRun& operator=(const BlockRun&) = delete;
  BlockRun(BlockRun&& other) noexcept { swap(other); }
  BlockRun& operator=(BlockRun&& other) noexcept {
    swap(other);
    return *this;
  }

  std::uint32_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const BlockId* data() const { return data_; }
  const BlockId* begin() const { return data_; }
  const BlockId* end() const { return data_ + size_; }
  BlockId operator[](std::uint32_t i) const { return data_[i]; }
  BlockId& operator[](std::uint32_t i) { return data_[i]; }
  BlockId back() const { return data_[size_ - 1]; }
  std::size_t capacity_bytes() const { return capacity_ * sizeof(BlockId); }

  void append(const BlockId* blocks, std::uint32_t count) {
    if (count == 0) return;
    if (size_ + count > capacity_) reserve(size_ + count);
    std::memcpy(data_ + size_, blocks, count * sizeof(BlockId));
    size_ += count;
  }

  BlockId pop_back() { return data_[--size_]; }

  // Takes the first `count` blocks away into a run of their own.
  BlockRun split_front(std::uint32_t count) {
    BlockRun front;
    front.append(data_, count);
    if (size_ > count) std::memmove(data_, data_ + count, (size_ - count) * sizeof(BlockId));
    size_ -= count;
    return front;
  }

 private:
  void swap(BlockRun& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

  // Exact for the first blocks (most leaves never grow), half as much again later (a decoding leaf does).
  void reserve(std::uint32_t wanted) {
    std::uint32_t capacity = capacity_ == 0 ? wanted : wanted + wanted / 2;
    auto* grown = static_cast<BlockId*>(std::realloc(data_, capacity * sizeof(BlockId)));
    if (grown == nullptr) throw std::bad_alloc();
    data_ = grown;
    capacity_ = capacity;
  }

  BlockId* data_ = nullptr;
  std::uint32_t size_ = 0;
  std::uint32_t capacity_ = 0;
};

}  // namespace caudex
