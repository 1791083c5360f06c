#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace caudex::kernels {

// Zeroed memory straight from the system, on huge pages where it gives them: weights and keys are read in long streams
// over hundreds of megabytes, where looking up 4 KB pages costs up to a third of the time. Pages become resident when
// they are first written.
class ZeroedMemory {
 public:
  // Throws std::bad_alloc if the address space cannot be had.
  explicit ZeroedMemory(std::size_t bytes);
  ~ZeroedMemory();
  ZeroedMemory(ZeroedMemory&& other) noexcept;
  ZeroedMemory& operator=(ZeroedMemory&&) = delete;

  char* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  void* mapping_;
  std::size_t mapped_bytes_;
  char* data_;  // on a huge page's boundary
  std::size_t size_;
};

// Memory for many long-lived pieces, such as a model's weights, side by side on the same huge pages. Pieces are freed
// together with the arena.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Zeroed, on a cache-line boundary.
  char* allocate(std::size_t bytes);

 private:
  std::vector<ZeroedMemory> regions_;
  std::size_t used_ = 0;  // of the last region
};

}  // namespace caudex::kernels
