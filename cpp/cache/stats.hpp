// What the cache counts. Exact, and the sums close.
#pragma once

#include <cstdint>

namespace caudex {

// For one namespace, or summed over all.
struct Stats {
  std::uint64_t requests = 0;         // begun, resumed ones apart
  std::uint64_t lookup_tokens = 0;    // of their prompts: = hit_whole + hit_partial + missed
  std::uint64_t hit_whole_tokens = 0;    // in whole blocks, shared
  std::uint64_t hit_partial_tokens = 0;  // in a copied block's first slots
  std::uint64_t resumed_requests = 0;    // begun again after a preemption: their look-ups are counted apart
  std::uint64_t resumed_tokens = 0;
  std::uint64_t resumed_hit_tokens = 0;
  std::uint64_t committed_tokens = 0;  // computed: KV written beyond what was cached
  std::uint64_t adopted_blocks = 0;    // given back at commit, an equal block being there
  std::uint64_t evicted_blocks = 0;
  std::uint64_t evicted_tokens = 0;
  std::uint64_t thrashed_tokens = 0;  // computed again within the window of their eviction

  Stats& operator+=(const Stats& other) {
    requests += other.requests;
    lookup_tokens += other.lookup_tokens;
    hit_whole_tokens += other.hit_whole_tokens;
    hit_partial_tokens += other.hit_partial_tokens;
    resumed_requests += other.resumed_requests;
    resumed_tokens += other.resumed_tokens;
    resumed_hit_tokens += other.resumed_hit_tokens;
    committed_tokens += other.committed_tokens;
    adopted_blocks += other.adopted_blocks;
    evicted_blocks += other.evicted_blocks;
    evicted_tokens += other.evicted_tokens;
    thrashed_tokens += other.thrashed_tokens;
    return *this;
  }
  std::uint64_t missed_tokens() const { return lookup_tokens - hit_whole_tokens - hit_partial_tokens; }
};

// What lies in the pool right now, of one namespace or of all.
struct Occupancy {
  std::uint64_t pinned_blocks = 0;   // of running requests
  std::uint64_t cached_blocks = 0;   // evictable
  std::uint64_t unused_slots = 0;    // allocated and not filled: internal fragmentation
  std::uint64_t repeated_slots = 0;  // copies of slots that another block holds too, where prompts part inside a block

  Occupancy& operator+=(const Occupancy& other) {
    pinned_blocks += other.pinned_blocks;
    cached_blocks += other.cached_blocks;
    unused_slots += other.unused_slots;
    repeated_slots += other.repeated_slots;
    return *this;
  }
};

}  // namespace caudex
