// The words of the cache: tokens, positions, blocks, nodes, and the errors it raises.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace caudex {

using Token = std::int32_t;      // a token id; negative values stand for content that is not text
using Position = std::uint32_t;  // a number of tokens, counted from the start of a prompt
using BlockId = std::int32_t;    // an index into the pool, and into the engine's KV tensors
using NodeId = std::uint32_t;    // an index into the node store
using SpaceId = std::uint32_t;   // a namespace

inline constexpr BlockId kNoBlock = -1;
inline constexpr SpaceId kNoSpace = UINT32_MAX;
inline constexpr NodeId kNoNode = 0;  // node 0 is never handed out

// More blocks were asked for than are free or evictable. Nothing was changed.
struct OutOfBlocks : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A broken invariant: a mistake of ours, never of the caller.
struct InvariantError : std::logic_error {
  using std::logic_error::logic_error;
};

inline void ensure(bool holds, const char* what) {
  if (!holds) throw InvariantError(what);
}

}  // namespace caudex
