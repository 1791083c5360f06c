// The tree of cached prefixes: which blocks hold which tokens, what is pinned, what may go.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cache/block_pool.hpp"
#include "cache/child_table.hpp"
#include "cache/hashing.hpp"
#include "cache/node.hpp"
#include "cache/policy.hpp"
#include "cache/sharing.hpp"
#include "cache/stats.hpp"
#include "cache/types.hpp"

namespace caudex {

// How fine the tree tells prompts apart.
enum class Grain {
  kToken,  // radix index: nodes end at any token, children are found by their next token
  kBlock,  // hash index: nodes end at block borders, children are found by the chained hash of their first block
};

// How far a prompt is known below some node.
struct Walk {
  NodeId node = kNoNode;  // the node that holds the last matched token (where the walk began, if none)
  Position end = 0;       // tokens matched, from the start of the prompt
};

// Blocks that have been evicted, each the parent of the one before.
struct Eviction {
  std::uint32_t num_blocks = 0;
  Position num_tokens = 0;  // that they held: all but the first are full
  SpaceId space = 0;
};

// A path-compressed tree over tokens; see node.hpp for a drawing. Tokens are compared one by one (as whole cache lines),
// so a hash collision is a miss and never a wrong match.
//
// Invariants:
//   * every block in use lies in exactly one node, or is private to one running request;
//   * a node is pinned (locks > 0) if a request's path goes through it, so the parent of a pinned node is pinned and
//     all descendants of an unpinned one are unpinned: every unpinned block can be evicted, by taking leaves' tails;
//   * locks(node) = anchors(node) + sum of locks(children);
//   * a node whose end lies inside a block holds that partly filled block if it is a leaf or anchored, else not.
//
// Costs: find, split, merge, evict are O(1) in the number of nodes and blocks; moving block ids (4 bytes each) aside.
class BlockTree {
 public:
  BlockTree(Grain grain, BlockPool& pool, const BlockHasher& hasher, Audiences& audiences)
      : grain_(grain), pool_(pool), hasher_(hasher), audiences_(audiences) {}

  void use_policy(std::unique_ptr<Policy> policy) { policy_ = std::move(policy); }
  Policy& policy() { return *policy_; }
  const NodeStore& nodes() const { return nodes_; }
  Grain grain() const { return grain_; }

  // A namespace is a root of its own: an empty node that is never evicted.
  NodeId add_root(SpaceId space, const std::string& name);
  // The caller guarantees that the root has no child and no anchor. The namespace's number may be used again.
  void remove_root(NodeId root);
  const std::uint8_t* root_key(SpaceId space) const { return root_keys_.data() + space * pool_.key_bytes(); }

  // The longest known continuation of the path that ends at `from`, by tokens[nodes[from].end, limit), as far as that
  // tenant may see it.
  Walk walk(NodeId from, const Token* tokens, Position limit, Tenant viewer) const;

  // The node on the path to `node` that ends exactly at `end`, split off if need be.
  // The caller guarantees that `end` lies on that path and, for Grain::kBlock, at a block border.
  NodeId node_ending_at(NodeId node, Position end);

  // The node that holds the block with that index, which `node` covers in part at least: itself or, if it ends inside
  // the block and does not hold it, a descendant, whose block repeats the slots.
  NodeId holder_of(NodeId node, std::uint32_t block_index) const;
  BlockId block_at(NodeId holder, std::uint32_t block_index) const {
    return nodes_[holder].blocks[block_index - first_block_index(nodes_[holder])];
  }

  // Writes the blocks with index [from, to) of the path to `node`, which holds the last of them.
  void copy_path(NodeId node, std::uint32_t from, std::uint32_t to, BlockId* blocks) const;

  // Pins the path to `node`: a request has got so far.
  void anchor(NodeId node);
  // Moves an anchor from `from` down to its descendant `to`.
  void descend(NodeId from, NodeId to);
  // Takes an anchor back. Nodes that nobody else pins become candidates for eviction, `node` first.
  void release(NodeId node);
  // Pins the path to a node whose last block will be copied, without being at its end; and unpins it.
  void hold(NodeId node);
  void let_go(NodeId node);

  // The tenant has computed what lies between its anchor at `above` and `node` itself, so it may see it from now on.
  void credit(NodeId above, NodeId node, Tenant tenant);
  // Takes over the caller's hold of the audience.
  void set_audience(NodeId node, AudienceId audience);
  // Everyone may see the path to `node`.
  void publish(NodeId node);

  // A new leaf below `parent` with that audience, whose hold it takes over, holding tokens up to `end` in these blocks (the first repeats the slots before the
  // parent's end, if that lies inside a block). The blocks' tokens have been written into the pool.
  NodeId add_leaf(NodeId parent, Position end, const BlockId* blocks, std::uint32_t count, AudienceId audience);
  // From now on its request may lengthen the leaf it has made, as long as nobody else ends there.
  void start_growing(NodeId leaf) { nodes_[leaf].growing = true; }
  // Lengthens a growing leaf; `blocks` are those beyond the ones it holds.
  void extend_leaf(NodeId leaf, Position end, const BlockId* blocks, std::uint32_t count);
  // Takes the partly filled last block out of a pinned node that ends inside a block and has children.
  BlockId take_tail(NodeId node);

  // Joins nodes of the path to `node` with their only children, where the policy agrees.
  void settle(NodeId node);

  // Takes blocks from the end of the policy's victim, at least one and at most `wanted`, and writes them to `blocks`, free
  // to be used. The caller guarantees num_cached() > 0.
  Eviction evict(std::uint32_t wanted, BlockId* blocks);

  std::uint32_t num_cached() const { return num_cached_; }  // blocks in unpinned nodes: all of them evictable
  std::uint32_t num_resident() const { return num_resident_; }  // blocks in nodes, pinned or not

  std::uint32_t first_block_index(const Node& node) const { return node.start / pool_.block_size(); }
  bool ends_inside_block(const Node& node) const { return node.end % pool_.block_size() != 0; }
  bool has_tail(const Node& node) const {
    return first_block_index(node) + node.blocks.size() > node.end / pool_.block_size();
  }

  // Gives blocks other numbers: block b becomes renamed[b].
  void rename(const std::vector<BlockId>& renamed);

  // What lies below a root.
  Occupancy occupancy(NodeId root) const;
  // Up to `count` tokens with which a cached prompt goes on after the walk, where that tenant may see one.
  std::vector<Token> continuation(const Walk& walk, Tenant viewer, std::size_t count) const;
  // All nodes below a root, parents first.
  void append_nodes(NodeId root, std::vector<NodeId>& nodes) const;
  // The tokens of a node, without its ancestors'.
  void copy_tokens(NodeId node, Token* tokens) const;
  void for_each_token(const std::function<void(Token)>& visit) const;

  // Throws InvariantError. Marks every block of the tree in `owned`, and throws if one is marked already.
  void check(std::vector<std::uint8_t>& owned) const;
  // One line a node, children indented.
  std::string dump() const;
  std::size_t bytes() const;

 private:
  template <typename Visit>
  void for_each_below(NodeId root, Visit visit) const;
  Token token_at(NodeId node, Position position) const;
  // What tells a child from its siblings: its first token in the radix index, and then nothing else has it; in the hash
  // index, half of its first block's fingerprint.
  std::uint32_t label_of(NodeId parent, Position position, const Token* tokens) const;
  NodeId find_child(NodeId parent, Position position, const Token* tokens, Position limit) const;
  Position compare(NodeId node, const Token* tokens, Position limit) const;
  NodeId split(NodeId lower, Position at);
  void join(NodeId upper, NodeId lower);
  void link_child(NodeId parent, NodeId child);
  void unlink_child(NodeId child);
  void discard(NodeId node);
  void lock(NodeId node);
  void unlock(NodeId node);
  void drop_redundant_tail(NodeId node);
  void remove_leaf(NodeId leaf);
  void check_node(NodeId id, std::vector<std::uint8_t>& owned) const;

  Grain grain_;
  BlockPool& pool_;
  const BlockHasher& hasher_;
  Audiences& audiences_;
  std::unique_ptr<Policy> policy_;
  NodeStore nodes_;
  ChildTable children_;
  std::vector<std::uint8_t> root_keys_;  // by namespace
  std::vector<NodeId> roots_;            // by namespace, kNoNode when removed
  std::uint64_t num_unpinned_ = 0;
  std::uint32_t num_cached_ = 0;
  std::uint32_t num_resident_ = 0;
};

}  // namespace caudex
