#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace caudex::kernels {

// Scratch memory on a cache-line boundary that grows and never shrinks. Growing loses the contents.
class AlignedBuffer {
 public:
  static constexpr std::size_t kAlignment = 64;

  // At least `bytes` bytes, of unspecified content.
  char* reserve(std::size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      memory_.reset(static_cast<char*>(::operator new(bytes, std::align_val_t(kAlignment))));
      size_ = bytes;
    }
    return memory_.get();
  }

  char* data() { return memory_.get(); }
  const char* data() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t(kAlignment)); }
  };
  std::unique_ptr<char, Free> memory_;
  std::size_t size_ = 0;
};

}  // namespace caudex::kernels
