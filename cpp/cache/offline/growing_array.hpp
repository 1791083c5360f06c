#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace caudex::offline {

// Plain values in one stretch of memory that grows by realloc(), which moves pages and not bytes once it is large:
// growing never needs room for two copies.
template <class T>
class GrowingArray {
 public:
  GrowingArray() = default;
  ~GrowingArray() { std::free(data_); }
  GrowingArray(const GrowingArray&) = delete;
  GrowingArray& operator=(const GrowingArray&) = delete;

  const T* operator+(std::size_t at) const { return data_ + at; }
  std::size_t size() const { return size_; }
  std::size_t bytes() const { return capacity_ * sizeof(T); }

  // Room for that many more values, which the caller fills in.
  T* extend(std::size_t count) {
    if (size_ + count > capacity_) reserve(size_ + count);
    size_ += count;
    return data_ + (size_ - count);
  }

 private:
  void reserve(std::size_t wanted) {
    const std::size_t capacity = std::max(wanted, capacity_ + capacity_ / 16);
    auto* grown = static_cast<T*>(std::realloc(data_, capacity * sizeof(T)));
    if (grown == nullptr) throw std::bad_alloc();
    data_ = grown;
    capacity_ = capacity;
  }

  T* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

}  // namespace caudex::offline
