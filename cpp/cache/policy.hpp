// The interface of an eviction policy: six verbs over the nodes of the tree.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/block_pool.hpp"
#include "cache/node.hpp"
#include "cache/types.hpp"

namespace caudex {

// What a caller may say about the conversation a request belongs to. All of it is optional.
struct SessionHints {
  std::uint64_t session = 0;      // equal for the requests of one conversation; 0 when unknown
  double expected_return = -1.0;  // seconds until the next request of the session; negative when unknown
  bool ends = false;              // no request of this session will follow
  double priority = 0.0;          // higher is kept longer, by policies that look at it
};

// A request, as it looks when it ends.
struct Request {
  std::uint64_t serial = 0;  // 1 for the first request of this cache, and so on
  double begin_time = 0.0;   // seconds on the cache's clock (wall clock, or the trace's in a replay)
  double end_time = 0.0;
  SpaceId space = 0;
  NodeId leaf = kNoNode;         // the last node of its path; follow `parent` to the root, which holds no tokens
  Position num_prompt_tokens = 0;
  Position num_cached_tokens = 0;  // found at the start, partial hit included
  Position num_tokens = 0;         // matchable now: prompt and output whose KV was written
  Position num_output_tokens = 0;  // generated, matchable or not
  SessionHints hints;
};

// What a policy has chosen to evict: a leaf's last blocks.
struct Victim {
  NodeId node = kNoNode;
  std::uint32_t num_blocks = 1;
};

// What a policy may look at. It owns nothing of this and must not change it.
struct PolicyContext {
  const NodeStore& nodes;
  const BlockPool& pool;
  const double& now;           // seconds on the cache's clock
  double tokens_per_id = 1.0;  // more than one in a replay of block ids
};

// An eviction policy chooses which unpinned leaf loses its last block next. The tree calls these verbs, one at a time
// and under the cache's lock; a policy keeps what it wants to know of a node in its own arrays, indexed by node id
// (ids are dense, `nodes.capacity()` is their bound, and an id may be used again after withdraw()).
//
// A node is a run of blocks which the policy agrees to treat alike, so every verb costs one call a node, not a block.
//
// Lifecycle of a node, as the policy sees it:
//
//     (committed, pinned)  --end_request-->  --offer-->  candidate  --withdraw-->  pinned again, or gone
//
//   * end_request(request) comes first, while the whole path is still pinned; then offer() for each node of the path
//     that nobody else pins, the leaf first and the root's child last.
//   * offer(node): the node is unpinned now. Its ancestors may be pinned or not; its descendants never are. Called again
//     when its last child has gone, so that it has become a leaf: a policy that orders leaves only takes it up then
//     (`nodes[node].is_leaf()`), one that orders all unpinned nodes ignores the second call.
//   * withdraw(node): the node is no candidate any more: a request has pinned it, it has gone, or it was merged away. A
//     node that is not a candidate may be withdrawn, which does nothing.
//   * split(upper, lower): `upper` is a new node that took over the first blocks of `lower`. Both inherit what was
//     known of `lower`, and `upper` is a candidate exactly if `lower` is (a candidate `lower` is never pinned).
//   * merge(upper, lower): may these become one node, with what is known of `lower`? `lower` is the only child of
//     `upper`; either both are pinned or neither is. On true the tree withdraws `upper`, whose blocks `lower` has
//     taken over. A policy whose order or learning tells them apart answers false.
//   * victim(wanted): an unpinned leaf, and how many of its last blocks go at once: at least one, at most `wanted`, more
//     than one only if the policy would choose that leaf again for each. It may note their fingerprints first
//     (`pool.fingerprint(block)`, meaningful when the block is full). When no block is left withdraw() follows. The
//     caller guarantees that a candidate exists.
//
// All state that outlives a node (ghosts, sessions, learned rates) belongs to the policy; bound it by the pool's size.
class Policy {
 public:
  explicit Policy(const PolicyContext& context) : nodes(context.nodes), pool(context.pool), now(context.now), tokens_per_id(context.tokens_per_id) {}
  virtual ~Policy() = default;
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  virtual void end_request(const Request& request) = 0;
  virtual void offer(NodeId node) = 0;
  virtual void withdraw(NodeId node) = 0;
  virtual void split(NodeId upper, NodeId lower) = 0;
  virtual bool merge(NodeId upper, NodeId lower) = 0;
  virtual Victim victim(std::uint32_t wanted) = 0;

  // Bytes of the policy's own state, for the cache's account of its memory.
  virtual std::size_t bytes() const { return 0; }

 protected:
  // Grows a per-node array so that `node` may index it.
  template <typename T>
  T& slot(std::vector<T>& states, NodeId node) {
    if (node >= states.size()) states.resize(node + 1 + node / 2);
    return states[node];
  }

  // As many of a leaf's last blocks as it has, for a policy that stays with its victim until that is gone.
  Victim whole(NodeId node, std::uint32_t wanted) const { return {node, std::min(wanted, nodes[node].blocks.size())}; }

  const NodeStore& nodes;
  const BlockPool& pool;
  const double& now;
  const double tokens_per_id;
};

// Makes the policy of that name, which may carry a parameter: "ttl:300". Throws std::invalid_argument that lists the
// known names, or says that this one takes no parameter.
std::unique_ptr<Policy> make_policy(const std::string& name, const PolicyContext& context);
std::vector<std::string> policy_names();

}  // namespace caudex
