// One running request, as the cache sees it.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/policy.hpp"
#include "cache/sharing.hpp"
#include "cache/types.hpp"

namespace caudex {

// To be executed on the KV tensors, in order, before any later write: copy the first slots of one block to another.
struct BlockCopy {
  BlockId source;
  BlockId destination;
  std::uint32_t num_slots;
};

// The tokens of a request, and where their KV lies.
//
//     tokens    0 ................................................. num_tokens
//     cached    0 ........ num_cached                                            found at begin()
//     written   0 ................ num_committed                                 KV is there
//     in tree   0 ............ anchor's end                                      pinned through the tree
//     table     0 ............ [ private blocks .............. )                 slots allocated
//
// Blocks with index below ceil(anchor's end / block size) belong to the tree; the rest of the table is private.
// Normally all that is written is in the tree. It lags behind where a longer copy of the last, partly filled block is
// there already; where the grain is a block; and while another request has yet to copy from the last block.
struct Sequence {
  std::uint64_t serial = 0;
  SpaceId space = 0;
  Tenant tenant = 0;
  std::vector<Token> tokens;
  std::vector<BlockId> table;
  NodeId anchor = kNoNode;
  NodeId source = kNoNode;  // a held node whose last block is to be copied at the next allocation
  BlockId source_block = kNoBlock;
  Position num_prompt = 0;
  Position num_public = 0;  // its beginning that the operator has registered for everyone
  Position num_cached = 0;
  Position num_committed = 0;
  Position num_unseen_output = 0;  // generated but not appended: a log of prompts knows only how many
  double begin_time = 0.0;
  SessionHints hints;
  bool running = false;
  bool is_pin = false;  // only holds what it has found: see PrefixCache::pin
  std::uint64_t batch = 0;  // the last batch call it took part in, so that it takes part once

  // The cache's list of running requests.
  Sequence* previous = nullptr;
  Sequence* next = nullptr;
};

}  // namespace caudex
