// A zero-filled array whose untouched pages cost no memory and whose elements keep to cache lines.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace caudex {

// Asks for 2 MB pages within a large array: a walk over a big pool otherwise waits for the page tables. Advice only.
inline void advise_huge_pages(void* data, std::size_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kHuge = std::uintptr_t{2} << 20;
  const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(data) + kHuge - 1) & ~(kHuge - 1);
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(data) + bytes) & ~(kHuge - 1);
  if (end > begin) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

// The pool reserves its arrays for every block at once. Large calloc() requests are served by fresh pages that the
// system fills when they are first written, so a pool of ten million blocks costs what has been used of it. The array
// begins on a cache line, which calloc() by itself does not promise: elements of 64 bytes lie in one line each.
template <typename T>
class LazyArray {
  static_assert(std::is_trivially_copyable_v<T>, "elements are moved as bytes");

 public:
  explicit LazyArray(std::size_t size = 0) : memory_(allocate(size * sizeof(T))), data_(align(memory_)), size_(size) {}
  ~LazyArray() { std::free(memory_); }
  LazyArray(const LazyArray&) = delete;
  LazyArray& operator=(const LazyArray&) = delete;
  LazyArray(LazyArray&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  LazyArray& operator=(LazyArray&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  std::size_t size() const { return size_; }

  // Copies the first `keep` elements into an array of `size`.
  LazyArray resized(std::size_t size, std::size_t keep) const {
    LazyArray grown(size);
    if (keep > 0) std::memcpy(grown.data_, data_, keep * sizeof(T));
    return grown;
  }

 private:
  static constexpr std::size_t kLine = 64;

  static void* allocate(std::size_t bytes) {
    if (bytes == 0) return nullptr;
    void* memory = std::calloc(1, bytes + kLine - 1);
    if (memory == nullptr) throw std::bad_alloc();
    advise_huge_pages(memory, bytes);
    return memory;
  }

  static T* align(void* memory) {
    return reinterpret_cast<T*>((reinterpret_cast<std::uintptr_t>(memory) + kLine - 1) / kLine * kLine);
  }

  void* memory_;
  T* data_;
  std::size_t size_;
};

}  // namespace caudex
