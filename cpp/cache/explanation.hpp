// Why a prompt did not hit further.
#pragma once

#include <string>
#include <vector>

#include "cache/types.hpp"

namespace caudex {

// The reasons, the most telling first; `reason` is the first that applies.
enum class MissReason {
  kComplete,        // nothing is missing: all but the last token are cached
  kEvicted,         // the next block was here, and went
  kOtherNamespace,  // another namespace or tenant has more of it
  kDiverged,        // a cached prompt goes on with other tokens
  kBelowBlock,      // what follows agrees, but does not fill a block (hash index)
  kNeverSeen,
};

struct Explanation {
  MissReason reason = MissReason::kNeverSeen;
  Position num_tokens = 0;  // the prompt's
  Position num_cached = 0;  // what match() finds

  // kEvicted
  double evicted_seconds_ago = 0.0;
  std::string policy;
  Position num_evicted = 0;  // tokens that would have followed

  // kOtherNamespace
  std::string other_space;
  Position num_cached_there = 0;

  // kDiverged, kBelowBlock
  Position diverged_at = 0;
  std::vector<Token> expected;  // how the closest cached prompt goes on there, a few tokens
};

}  // namespace caudex
