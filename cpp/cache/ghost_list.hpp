// The oldest-first list of what left a cache, as long as its owner wants it.
#pragma once

#include <cstdint>
#include <list>
#include <unordered_map>

namespace caudex {

// Fingerprints in the order in which they came. One that is taken out leaves no gap: unlike Ghosts, whose window counts
// evictions, this counts what is remembered, for policies that bound lists and their ghosts together. O(1).
class GhostList {
 public:
  std::size_t size() const { return places_.size(); }

  // One that is there already becomes the youngest.
  void add(std::uint64_t fingerprint) {
    take(fingerprint);
    places_.emplace(fingerprint, ghosts_.insert(ghosts_.end(), fingerprint));
  }

  // Forgets it; was it there?
  bool take(std::uint64_t fingerprint) {
    const auto found = places_.find(fingerprint);
    if (found == places_.end()) return false;
    ghosts_.erase(found->second);
    places_.erase(found);
    return true;
  }

  // The caller guarantees that the list is not empty.
  void forget_oldest() { take(ghosts_.front()); }

  std::size_t bytes() const { return size() * kBytesPerGhost + places_.bucket_count() * sizeof(void*); }

 private:
  static constexpr std::size_t kBytesPerGhost = 80;  // two nodes with their allocator's headers

  std::list<std::uint64_t> ghosts_;
  std::unordered_map<std::uint64_t, std::list<std::uint64_t>::iterator> places_;
};

}  // namespace caudex
