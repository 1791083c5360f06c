#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace caudex::offline {

// A prefix-chained id: it stands for its block and all blocks before it.
using ChainedId = std::int64_t;

// A borrowed view of a request log as flat arrays. Request i names the blocks ids[offsets[i] .. offsets[i + 1]).
//
//   ids of request i:   | full block | full block | full block | partial |
//                       |<---------- full(i) ------------------>|
//                       |<-- reusable(i): leaves one token to compute -->| (at most full(i))
struct BlockTrace {
  const ChainedId* ids;
  const std::int64_t* offsets;        // num_requests + 1, non-decreasing from 0
  const std::int64_t* input_lengths;  // tokens
  std::int64_t num_requests;
  std::int64_t block_size;  // tokens

  const ChainedId* path(std::int64_t i) const { return ids + offsets[i]; }

  // Blocks that are kept after the request: those filled to the last slot.
  std::int64_t full(std::int64_t i) const {
    return std::min(offsets[i + 1] - offsets[i], input_lengths[i] / block_size);
  }

  // Blocks that may be served from the cache: the last token is always computed, since its logits are needed.
  std::int64_t reusable(std::int64_t i) const {
    return std::min(full(i), std::max<std::int64_t>(input_lengths[i] - 1, 0) / block_size);
  }
};

}  // namespace caudex::offline
