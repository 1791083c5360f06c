#include "cache/block_tree.hpp"

#include <algorithm>
#include <sstream>

namespace caudex {
namespace {

// A block of 16 is compared as four vectors of the compiler's, without a branch or a call: it is what a match mostly does.
bool equal_tokens(const Token* a, const Token* b, Position count) {
  using Vector = std::uint64_t __attribute__((vector_size(16), aligned(4), may_alias));
  if (count != 16) return std::memcmp(a, b, count * sizeof(Token)) == 0;
  const auto* x = reinterpret_cast<const Vector*>(a);
  const auto* y = reinterpret_cast<const Vector*>(b);
  const Vector difference = ((x[0] ^ y[0]) | (x[1] ^ y[1])) | ((x[2] ^ y[2]) | (x[3] ^ y[3]));
  return (difference[0] | difference[1]) == 0;
}

// How many leading tokens are equal.
Position common_prefix(const Token* a, const Token* b, Position count) {
  Position i = 0;
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

inline void prefetch(const void* address) { __builtin_prefetch(address); }

}  // namespace

// ---------------------------------------------------------------------------------------------------- namespaces

NodeId BlockTree::add_root(SpaceId space, const std::string& name) {
  NodeId root = nodes_.add();
  nodes_[root].space = space;
  if (roots_.size() <= space) {
    roots_.resize(space + 1, kNoNode);
    root_keys_.resize((space + 1) * pool_.key_bytes());
  }
  roots_[space] = root;
  hasher_.root(name, root_keys_.data() + space * pool_.key_bytes());
  return root;
}

void BlockTree::remove_root(NodeId root) {
  roots_[nodes_[root].space] = kNoNode;
  nodes_.remove(root);
}

// ------------------------------------------------------------------------------------------------------- look-up

Walk BlockTree::walk(NodeId from, const Token* tokens, Position limit, Tenant viewer) const {
  Walk walk{from, nodes_[from].end};
  while (walk.end < limit) {
    NodeId child = find_child(walk.node, walk.end, tokens, limit);
    if (child == kNoNode || !audiences_.admits(nodes_[child].audience, viewer)) break;
    Position end = compare(child, tokens, limit);
    walk = {child, end};
    if (end < nodes_[child].end) break;
  }
  return walk;
}

NodeId BlockTree::find_child(NodeId parent, Position position, const Token* tokens, Position limit) const {
  if (grain_ == Grain::kBlock && limit - position < pool_.block_size()) return kNoNode;
  const std::uint32_t label = label_of(parent, position, tokens);
  return children_.find(parent, label, [&](NodeId child) {
    const Node& node = nodes_[child];
    if (node.parent != parent || node.label != label) return false;
    if (grain_ == Grain::kToken) return true;
    // A hash may be that of other tokens.
    return std::memcmp(pool_.tokens(node.blocks[0]), tokens + position, pool_.block_size() * sizeof(Token)) == 0;
  });
}

std::uint32_t BlockTree::label_of(NodeId parent, Position position, const Token* tokens) const {
  if (grain_ == Grain::kToken) return static_cast<std::uint32_t>(tokens[position]);
  const Node& node = nodes_[parent];
  std::uint8_t key[kMaxKeyBytes];
  hasher_.chain(node.is_root() ? root_key(node.space) : pool_.key(node.blocks.back()), tokens + position,
                pool_.block_size(), key);
  std::uint64_t first;
  std::memcpy(&first, key, sizeof first);
  return static_cast<std::uint32_t>(first);
}

// Where `tokens` and the node part ways: at least its start, at most its end. Whole blocks only for Grain::kBlock.
Position BlockTree::compare(NodeId id, const Token* tokens, Position limit) const {
  constexpr std::uint32_t kAhead = 6;  // blocks: enough lines in flight to hide the memory's latency
  const Node& node = nodes_[id];
  const Position size = pool_.block_size();
  const Position stop = std::min(node.end, limit);
  if (grain_ == Grain::kToken && stop == node.start + 1) return stop;  // its label is that token
  const std::uint32_t first = first_block_index(node);
  const std::uint32_t held = node.blocks.size();
  Position position = node.start;
  for (std::uint32_t i = 0; i < std::min(kAhead, held); ++i) prefetch(pool_.tokens(node.blocks[i]));
  for (std::uint32_t i = 0; position < stop; ++i) {
    if (i + kAhead < held) prefetch(pool_.tokens(node.blocks[i + kAhead]));
    const Position border = (first + i) * size;
    const BlockId block = i < held ? node.blocks[i] : block_at(holder_of(id, first + i), first + i);
    const Token* stored = pool_.tokens(block) + (position - border);
    const Position count = std::min(stop, border + size) - position;
    if (!equal_tokens(stored, tokens + position, count)) {
      if (grain_ == Grain::kToken) position += common_prefix(stored, tokens + position, count);
      return position;
    }
    if (grain_ == Grain::kBlock && count < size) return position;
    position += count;
  }
  return position;
}

NodeId BlockTree::holder_of(NodeId node, std::uint32_t block_index) const {
  while (first_block_index(nodes_[node]) + nodes_[node].blocks.size() <= block_index) node = nodes_[node].first_child;
  return node;
}

Token BlockTree::token_at(NodeId node, Position position) const {
  const std::uint32_t index = position / pool_.block_size();
  return pool_.tokens(block_at(holder_of(node, index), index))[position % pool_.block_size()];
}

void BlockTree::copy_path(NodeId id, std::uint32_t from, std::uint32_t to, BlockId* blocks) const {
  // From the end to the front: where a node repeats its parent's last slots, its own block is the one that goes on.
  for (; to > from; id = nodes_[id].parent) {
    const Node& node = nodes_[id];
    const std::uint32_t first = first_block_index(node);
    const std::uint32_t begin = std::max(first, from);
    if (begin >= to) continue;
    std::copy(node.blocks.begin() + (begin - first), node.blocks.begin() + (to - first), blocks + (begin - from));
    to = begin;
  }
}

// ------------------------------------------------------------------------------------------------ shape of the tree

NodeId BlockTree::node_ending_at(NodeId node, Position end) {
  while (!nodes_[node].is_root() && nodes_[node].start >= end) node = nodes_[node].parent;
  return nodes_[node].end == end ? node : split(node, end);
}

//   parent -- lower [start ------------- end)     becomes    parent -- upper [start -- at) -- lower [at --- end)
NodeId BlockTree::split(NodeId lower, Position at) {
  children_.reserve(2);
  const NodeId upper = nodes_.add();
  Node& low = nodes_[lower];
  Node& up = nodes_[upper];
  const std::uint32_t kept = at / pool_.block_size() - first_block_index(low);

  const auto token = static_cast<std::uint32_t>(token_at(lower, at));
  up.blocks = low.blocks.split_front(kept);
  up.start = low.start;
  up.end = low.start = at;
  up.locks = low.locks;
  up.space = low.space;
  up.audience = low.audience;
  up.unpinned = low.unpinned;
  audiences_.hold(up.audience);
  up.label = low.label;
  const NodeId parent = low.parent;
  unlink_child(lower);
  low.label = grain_ == Grain::kToken ? token : static_cast<std::uint32_t>(pool_.fingerprint(low.blocks[0]));
  link_child(parent, upper);
  link_child(upper, lower);
  policy_->split(upper, lower);
  return upper;
}

void BlockTree::join(NodeId upper, NodeId lower) {
  policy_->withdraw(upper);
  const NodeId parent = nodes_[upper].parent;
  unlink_child(lower);
  unlink_child(upper);
  Node& up = nodes_[upper];
  Node& low = nodes_[lower];
  up.blocks.append(low.blocks.data(), low.blocks.size());
  low.blocks = std::move(up.blocks);
  low.start = up.start;
  low.label = up.label;
  link_child(parent, lower);
  discard(upper);
}

void BlockTree::settle(NodeId node) {
  for (NodeId upper = node; !nodes_[upper].is_root();) {
    const NodeId parent = nodes_[upper].parent;
    const Node& up = nodes_[upper];
    const NodeId lower = up.first_child;
    if (up.locks == 0 && lower != kNoNode && up.has_only_child(nodes_[lower]) &&
        up.audience == nodes_[lower].audience && policy_->merge(upper, lower)) {
      join(upper, lower);
    }
    upper = parent;
  }
}

void BlockTree::link_child(NodeId parent, NodeId child) {
  Node& node = nodes_[child];
  node.parent = parent;
  node.previous_sibling = kNoNode;
  node.next_sibling = nodes_[parent].first_child;
  if (node.next_sibling != kNoNode) nodes_[node.next_sibling].previous_sibling = child;
  nodes_[parent].first_child = child;
  children_.insert(parent, node.label, child);
}

void BlockTree::unlink_child(NodeId child) {
  Node& node = nodes_[child];
  children_.erase(node.parent, node.label, child);
  if (node.previous_sibling != kNoNode) nodes_[node.previous_sibling].next_sibling = node.next_sibling;
  else nodes_[node.parent].first_child = node.next_sibling;
  if (node.next_sibling != kNoNode) nodes_[node.next_sibling].previous_sibling = node.previous_sibling;
  node.next_sibling = node.previous_sibling = kNoNode;
}

// ------------------------------------------------------------------------------------------------------- audiences

void BlockTree::set_audience(NodeId node, AudienceId audience) {
  audiences_.drop(nodes_[node].audience);
  nodes_[node].audience = audience;
}

void BlockTree::credit(NodeId above, NodeId node, Tenant tenant) {
  for (NodeId id = node; id != above; id = nodes_[id].parent) {
    if (audiences_.admits(nodes_[id].audience, tenant)) continue;
    set_audience(id, audiences_.join(nodes_[id].audience, tenant));
  }
}

void BlockTree::publish(NodeId node) {
  for (NodeId id = node; !nodes_[id].is_root(); id = nodes_[id].parent) set_audience(id, kEveryone);
}

void BlockTree::discard(NodeId node) {
  audiences_.drop(nodes_[node].audience);
  nodes_.remove(node);
}

// ----------------------------------------------------------------------------------------------------------- pins

void BlockTree::lock(NodeId id) {
  Node& node = nodes_[id];
  if (node.locks++ > 0) return;
  num_cached_ -= node.blocks.size();
  policy_->withdraw(id);
}

void BlockTree::unlock(NodeId id) {
  Node& node = nodes_[id];
  if (--node.locks > 0) return;
  num_cached_ += node.blocks.size();
  node.unpinned = ++num_unpinned_;
  policy_->offer(id);
}

void BlockTree::hold(NodeId node) {
  ++nodes_[node].anchors;
  for (NodeId id = node; !nodes_[id].is_root(); id = nodes_[id].parent) lock(id);
}

void BlockTree::let_go(NodeId node) {
  --nodes_[node].anchors;
  drop_redundant_tail(node);
  for (NodeId id = node; !nodes_[id].is_root(); id = nodes_[id].parent) unlock(id);
  settle(node);
}

void BlockTree::anchor(NodeId node) {
  nodes_[node].growing = false;
  hold(node);
}

void BlockTree::release(NodeId node) {
  nodes_[node].growing = false;
  let_go(node);
}

void BlockTree::descend(NodeId from, NodeId to) {
  nodes_[from].growing = nodes_[to].growing = false;
  for (NodeId id = to; id != from; id = nodes_[id].parent) lock(id);
  ++nodes_[to].anchors;
  --nodes_[from].anchors;
  drop_redundant_tail(from);
}

// ----------------------------------------------------------------------------------------------- growing, shrinking

NodeId BlockTree::add_leaf(NodeId parent, Position end, const BlockId* blocks, std::uint32_t count,
                           AudienceId audience) {
  children_.reserve(1);
  const NodeId leaf = nodes_.add();
  Node& node = nodes_[leaf];
  node.blocks.append(blocks, count);
  node.start = nodes_[parent].end;
  node.end = end;
  node.space = nodes_[parent].space;
  node.audience = audience;
  const std::uint32_t within = node.start % pool_.block_size();
  node.label = static_cast<std::uint32_t>(grain_ == Grain::kToken ? pool_.tokens(blocks[0])[within]
                                                                  : pool_.fingerprint(blocks[0]));
  link_child(parent, leaf);
  num_resident_ += count;
  num_cached_ += count;
  drop_redundant_tail(parent);
  return leaf;
}

void BlockTree::extend_leaf(NodeId leaf, Position end, const BlockId* blocks, std::uint32_t count) {
  nodes_[leaf].blocks.append(blocks, count);
  nodes_[leaf].end = end;
  num_resident_ += count;
}

BlockId BlockTree::take_tail(NodeId node) {
  --num_resident_;
  return nodes_[node].blocks.pop_back();
}

void BlockTree::drop_redundant_tail(NodeId id) {
  Node& node = nodes_[id];
  if (node.anchors > 0 || node.is_leaf() || !ends_inside_block(node) || !has_tail(node)) return;
  if (!node.is_pinned()) --num_cached_;
  pool_.give(take_tail(id));
}

Eviction BlockTree::evict(std::uint32_t wanted, BlockId* blocks) {
  const Victim victim = policy_->victim(wanted);
  Node& node = nodes_[victim.node];
  ensure(node.is_leaf() && !node.is_pinned() && victim.num_blocks > 0 && victim.num_blocks <= wanted &&
             victim.num_blocks <= node.blocks.size(),
         "the policy's victim is no unpinned leaf with so many blocks");
  for (std::uint32_t i = 0; i < victim.num_blocks; ++i) blocks[i] = take_tail(victim.node);
  num_cached_ -= victim.num_blocks;
  const Position border = (first_block_index(node) + node.blocks.size()) * pool_.block_size();
  const Eviction eviction{victim.num_blocks, node.end - border, node.space};
  if (node.blocks.empty()) remove_leaf(victim.node);
  else node.end = border;
  return eviction;
}

// Removes a leaf without blocks, and what of its ancestors cannot stand without it: a branch that ends inside a block
// goes back to that block's border, since the slots beyond were the children's.
void BlockTree::remove_leaf(NodeId leaf) {
  for (;;) {
    const NodeId parent = nodes_[leaf].parent;
    policy_->withdraw(leaf);
    unlink_child(leaf);
    discard(leaf);
    Node& node = nodes_[parent];
    if (node.is_root()) return;
    if (!node.is_leaf()) return settle(parent);
    if (node.is_pinned()) return;  // it is a request's end, and holds its own tail
    if (!node.blocks.empty()) {
      node.end = (first_block_index(node) + node.blocks.size()) * pool_.block_size();
      return policy_->offer(parent);
    }
    leaf = parent;
  }
}

// -------------------------------------------------------------------------------------------------- looking inside

// Calls visit(id) for every node below `root`, parents first.
template <typename Visit>
void BlockTree::for_each_below(NodeId root, Visit visit) const {
  std::vector<NodeId> stack{root};
  while (!stack.empty()) {
    const NodeId id = stack.back();
    stack.pop_back();
    if (id != root) visit(id);
    for (NodeId c = nodes_[id].first_child; c != kNoNode; c = nodes_[c].next_sibling) stack.push_back(c);
  }
}

Occupancy BlockTree::occupancy(NodeId root) const {
  Occupancy sum;
  const Position size = pool_.block_size();
  for_each_below(root, [&](NodeId id) {
    const Node& node = nodes_[id];
    (node.is_pinned() ? sum.pinned_blocks : sum.cached_blocks) += node.blocks.size();
    if (!node.blocks.empty()) sum.repeated_slots += node.start % size;
    if (ends_inside_block(node) && has_tail(node)) sum.unused_slots += size - node.end % size;
  });
  return sum;
}

void BlockTree::rename(const std::vector<BlockId>& renamed) {
  for (NodeId id = 1; id < nodes_.capacity(); ++id) {
    BlockRun& run = nodes_[id].blocks;
    for (std::uint32_t i = 0; i < run.size(); ++i) run[i] = renamed[run[i]];
  }
}

std::vector<Token> BlockTree::continuation(const Walk& walk, Tenant viewer, std::size_t count) const {
  std::vector<Token> tokens;
  NodeId id = walk.node;
  for (Position position = walk.end; tokens.size() < count; ++position) {
    while (id != kNoNode && (nodes_[id].end == position || !audiences_.admits(nodes_[id].audience, viewer))) {
      id = nodes_[id].end == position ? nodes_[id].first_child : nodes_[id].next_sibling;
    }
    if (id == kNoNode) break;
    tokens.push_back(token_at(id, position));
  }
  return tokens;
}

void BlockTree::append_nodes(NodeId root, std::vector<NodeId>& nodes) const {
  for_each_below(root, [&](NodeId id) { nodes.push_back(id); });
}

void BlockTree::copy_tokens(NodeId id, Token* tokens) const {
  for (Position at = nodes_[id].start; at < nodes_[id].end; ++at) *tokens++ = token_at(id, at);
}

void BlockTree::for_each_token(const std::function<void(Token)>& visit) const {
  for (NodeId root : roots_) {
    if (root == kNoNode) continue;
    for_each_below(root, [&](NodeId id) {
      for (Position at = nodes_[id].start; at < nodes_[id].end; ++at) visit(token_at(id, at));
    });
  }
}

void BlockTree::check(std::vector<std::uint8_t>& owned) const {
  std::uint32_t cached = 0, resident = 0;
  std::size_t reached = 0;
  std::vector<NodeId> stack;
  for (NodeId root : roots_) {
    if (root != kNoNode) stack.push_back(root);
  }
  std::size_t num_roots = stack.size();
  while (!stack.empty()) {
    const NodeId id = stack.back();
    stack.pop_back();
    ++reached;
    check_node(id, owned);
    resident += nodes_[id].blocks.size();
    if (!nodes_[id].is_pinned()) cached += nodes_[id].blocks.size();
    for (NodeId c = nodes_[id].first_child; c != kNoNode; c = nodes_[c].next_sibling) stack.push_back(c);
  }
  ensure(reached == nodes_.count(), "a node is out of reach");
  ensure(reached - num_roots == children_.size(), "the child table holds a stale entry");
  ensure(cached == num_cached_, "the count of cached blocks is off");
  ensure(resident == num_resident_, "the count of resident blocks is off");
}

void BlockTree::check_node(NodeId id, std::vector<std::uint8_t>& owned) const {
  const Node& node = nodes_[id];
  std::uint64_t locks = node.anchors;
  for (NodeId c = node.first_child; c != kNoNode; c = nodes_[c].next_sibling) {
    const Node& child = nodes_[c];
    locks += child.locks;
    ensure(child.parent == id && child.start == node.end && child.space == node.space, "a child does not fit");
  }
  if (node.is_root()) return ensure(node.end == 0 && node.blocks.empty(), "a root holds tokens");
  ensure(locks == node.locks, "locks are not anchors plus the children's locks");
  ensure(node.start < node.end, "a node is empty");
  ensure(children_.find(node.parent, node.label, [&](NodeId child) { return child == id; }) == id,
         "a node is not in the child table");
  if (grain_ == Grain::kToken) {
    ensure(node.label == static_cast<std::uint32_t>(token_at(id, node.start)), "a node's label is not its first token");
  }
  const bool tail = ends_inside_block(node) && (node.is_leaf() || node.anchors > 0);
  ensure(node.blocks.size() == node.end / pool_.block_size() - first_block_index(node) + tail,
         "a node holds the wrong number of blocks");
  for (BlockId block : node.blocks) {
    ensure(!owned[block], "a block has two owners");
    owned[block] = 1;
  }
}

std::string BlockTree::dump() const {
  std::ostringstream out;
  struct Item {
    NodeId id;
    int depth;
  };
  for (NodeId root : roots_) {
    if (root == kNoNode) continue;
    out << "namespace " << nodes_[root].space << "\n";
    std::vector<Item> stack;
    for (NodeId c = nodes_[root].first_child; c != kNoNode; c = nodes_[c].next_sibling) stack.push_back({c, 1});
    while (!stack.empty()) {
      const Item item = stack.back();
      stack.pop_back();
      const Node& node = nodes_[item.id];
      out << std::string(2 * item.depth, ' ') << "[" << node.start << ", " << node.end << ") blocks";
      for (BlockId block : node.blocks) out << " " << block;
      if (node.locks > 0) out << "  pinned by " << node.locks;
      out << "\n";
      for (NodeId c = node.first_child; c != kNoNode; c = nodes_[c].next_sibling) stack.push_back({c, item.depth + 1});
    }
  }
  return out.str();
}

std::size_t BlockTree::bytes() const {
  std::size_t bytes = nodes_.count() * sizeof(Node) + children_.bytes() + policy_->bytes();
  for (NodeId id = 1; id < nodes_.capacity(); ++id) bytes += nodes_[id].blocks.heap_bytes();
  return bytes;
}

}  // namespace caudex
