#include "kernels/memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

namespace caudex::kernels {
namespace {

constexpr std::size_t kHugePage = std::size_t{1} << 21;
constexpr std::size_t kRegionBytes = std::size_t{1} << 26;
constexpr std::size_t kCacheLine = 64;

}  // namespace

ZeroedMemory::ZeroedMemory(std::size_t bytes) : mapped_bytes_(bytes + kHugePage), size_(bytes) {
  mapping_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
  data_ = static_cast<char*>(mapping_) + (kHugePage - address % kHugePage) % kHugePage;
#if defined(MADV_HUGEPAGE)
  madvise(data_, size_, MADV_HUGEPAGE);  // only a wish
#endif
}

ZeroedMemory::~ZeroedMemory() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_bytes_);
}

ZeroedMemory::ZeroedMemory(ZeroedMemory&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_bytes_(other.mapped_bytes_),
      data_(other.data_),
      size_(other.size_) {}

char* Arena::allocate(std::size_t bytes) {
  bytes = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  if (regions_.empty() || used_ + bytes > regions_.back().size()) {
    regions_.emplace_back(std::max(bytes, kRegionBytes));
    used_ = 0;
  }
  char* piece = regions_.back().data() + used_;
  used_ += bytes;
  return piece;
}

}  // namespace caudex::kernels
