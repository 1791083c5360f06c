#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cache/prefix_cache.hpp"

namespace caudex::offline {

// A borrowed view of a request log as tokens. Request i is tokens[offsets[i] .. offsets[i + 1]): first its prompt,
// then what was generated for it. A log of block ids is one of tokens too, at a block size of 1.
struct TokenTrace {
  const Token* tokens;
  const std::int64_t* offsets;         // num_requests + 1, non-decreasing from 0
  const std::int64_t* prompt_lengths;  // at most the request's length
  const std::int64_t* hit_limits;      // tokens that count as served at most; null: as the cache has it
  const std::int64_t* kept_lengths;    // leading tokens whose KV is written, so that they can be matched later
  const double* times;                 // seconds
  const std::int64_t* unseen_output;   // tokens generated but not in the log; null: none
  const std::int64_t* tenants;         // by number; null: one and the same
  const SessionHints* hints;           // null: none
  std::int64_t num_requests;
};

// Called now and then with the number of requests done; throws to stop.
using Progress = std::function<void(std::int64_t)>;

struct ReplayResult {
  std::vector<std::int64_t> hit_tokens;  // by request: prompt tokens served from the cache, partial hits included
  Stats stats;
  std::uint32_t num_cached_blocks = 0;  // at the end
};

// Runs the requests of a log through a new cache, one after another, each finished before the next begins. A request
// that is longer than the whole pool keeps as many of its first blocks as there are. Costs what the cache costs, and
// nothing else.
ReplayResult replay(const TokenTrace& trace, const CacheOptions& options, const Progress& progress);

}  // namespace caudex::offline
