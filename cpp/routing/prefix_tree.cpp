#include "routing/prefix_tree.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace caudex::routing {
namespace {

std::size_t common_length(const std::vector<Key>& edge, const Key* keys, std::size_t num_keys) {
  const std::size_t limit = std::min(edge.size(), num_keys);
  return static_cast<std::size_t>(std::mismatch(edge.begin(), edge.begin() + limit, keys).first - edge.begin());
}

}  // namespace

PrefixTree::PrefixTree(std::size_t default_capacity) : default_capacity_(default_capacity), nodes_(1) {}

PrefixTree::WorkerState& PrefixTree::state(Worker worker) {
  if (worker >= workers_.size()) {
    WorkerState empty;
    empty.capacity = default_capacity_;
    workers_.resize(worker + 1, empty);
  }
  return workers_[worker];
}

void PrefixTree::set_capacity(Worker worker, std::size_t num_keys) {
  WorkerState& mine = state(worker);
  mine.capacity = num_keys;
  if (mine.num_keys > num_keys) evict(worker, mine.num_keys - num_keys);
}

std::size_t PrefixTree::num_keys(Worker worker) const {
  return worker < workers_.size() ? workers_[worker].num_keys : 0;
}

void PrefixTree::held(std::int64_t* out, std::size_t num_workers) const {
  for (Worker worker = 0; worker < num_workers; ++worker) out[worker] = static_cast<std::int64_t>(num_keys(worker));
}

PrefixTree::NodeId PrefixTree::child(NodeId parent, Key first_key) const {
  const auto found = by_first_key_.find(first_key);
  // The parent differs only if two prefixes collide in 64 bits; then there is no match to speak of.
  return found != by_first_key_.end() && nodes_[found->second].parent == parent ? found->second : kNone;
}

void PrefixTree::match(const Key* keys, std::size_t num_keys, std::int32_t* out, std::size_t num_workers) const {
  std::fill(out, out + num_workers, 0);
  NodeId node = kRoot;
  for (std::size_t depth = 0; depth < num_keys;) {
    node = child(node, keys[depth]);
    if (node == kNone) return;
    const Node& here = nodes_[node];
    const std::size_t shared = common_length(here.edge, keys + depth, num_keys - depth);
    for (const Holder& holder : here.holders) {
      if (holder.worker >= num_workers) continue;
      out[holder.worker] = static_cast<std::int32_t>(depth + std::min<std::size_t>(shared, holder.length));
    }
    if (shared < here.edge.size()) return;
    depth += shared;
  }
}

void PrefixTree::insert(Worker worker, const Key* keys, std::size_t num_keys, double now) {
  WorkerState& mine = state(worker);
  // What lies beyond the capacity would be evicted again at the end of this call.
  num_keys = std::min(num_keys, mine.capacity);
  std::vector<NodeId> path;
  NodeId node = kRoot;
  for (std::size_t depth = 0; depth < num_keys;) {
    const NodeId next = child(node, keys[depth]);
    if (next == kNone) {
      if (by_first_key_.count(keys[depth])) break;  // a collision of keys: leave the rest unrecorded
      node = append_node(node, keys + depth, num_keys - depth);
      hold(node, worker, static_cast<std::uint32_t>(num_keys - depth), now);
      path.push_back(node);
      break;
    }
    node = next;
    const std::size_t shared = common_length(nodes_[node].edge, keys + depth, num_keys - depth);
    const Holder* held = find_holder(node, worker);
    const bool ends_inside = shared < nodes_[node].edge.size();
    const bool diverges = ends_inside && depth + shared < num_keys;
    // What a worker holds beyond this prompt is not touched by it, so it must age on its own.
    if (diverges || (ends_inside && held && held->length > shared)) {
      split(node, shared);
      node = nodes_[node].parent;
    }
    hold(node, worker, static_cast<std::uint32_t>(shared), now);
    path.push_back(node);
    depth += shared;
  }
  for (auto it = path.rbegin(); it != path.rend(); ++it) {
    const EntryId entry = find_holder(*it, worker)->entry;
    unlink(entry);
    link_newest(entry);
  }
  if (workers_[worker].num_keys > workers_[worker].capacity) {
    evict(worker, workers_[worker].num_keys - workers_[worker].capacity);
  }
  for (auto it = path.rbegin(); it != path.rend(); ++it) {
    if (nodes_[*it].parent != kNone) merge_with_only_child(*it);
  }
}

void PrefixTree::expire(Worker worker, double time) {
  const WorkerState& mine = state(worker);
  while (mine.oldest != kNone && entries_[mine.oldest].last_use < time) {
    release(entries_[mine.oldest].node, worker);
  }
}

void PrefixTree::expire_all(double time) {
  for (Worker worker = 0; worker < workers_.size(); ++worker) expire(worker, time);
}

void PrefixTree::forget(Worker worker) {
  const WorkerState& mine = state(worker);
  while (mine.oldest != kNone) release(entries_[mine.oldest].node, worker);
}

void PrefixTree::evict(Worker worker, std::size_t num_keys) {
  WorkerState& mine = workers_[worker];
  while (num_keys > 0 && mine.oldest != kNone) {
    const NodeId node = entries_[mine.oldest].node;
    Holder& holder = *find_holder(node, worker);
    if (holder.length <= num_keys) {
      num_keys -= holder.length;
      release(node, worker);
    } else {
      holder.length -= static_cast<std::uint32_t>(num_keys);
      mine.num_keys -= num_keys;
      num_keys = 0;
      shrink(node);
    }
  }
}

PrefixTree::Holder* PrefixTree::find_holder(NodeId node, Worker worker) {
  auto& holders = nodes_[node].holders;
  const auto at = std::lower_bound(holders.begin(), holders.end(), worker,
                                   [](const Holder& holder, Worker w) { return holder.worker < w; });
  return at != holders.end() && at->worker == worker ? &*at : nullptr;
}

/// Makes `worker` hold at least `length` keys of the node, used at `now`.
PrefixTree::Holder& PrefixTree::hold(NodeId node, Worker worker, std::uint32_t length, double now) {
  Holder* holder = find_holder(node, worker);
  if (!holder) {
    auto& holders = nodes_[node].holders;
    const auto at = std::lower_bound(holders.begin(), holders.end(), worker,
                                     [](const Holder& other, Worker w) { return other.worker < w; });
    const EntryId entry = new_entry(node, worker, now);
    link_newest(entry);
    holder = &*holders.insert(at, Holder{worker, 0, entry});
  }
  entries_[holder->entry].last_use = now;
  if (length > holder->length) {
    workers_[worker].num_keys += length - holder->length;
    holder->length = length;
  }
  return *holder;
}

/// Takes the node from `worker`, for which it is a leaf.
void PrefixTree::release(NodeId node, Worker worker) {
  Holder* holder = find_holder(node, worker);
  workers_[worker].num_keys -= holder->length;
  unlink(holder->entry);
  free_entries_.push_back(holder->entry);
  auto& holders = nodes_[node].holders;
  holders.erase(holders.begin() + (holder - holders.data()));
  shrink(node);
}

/// Cuts the part of the edge that no worker holds any more; removes the node if that is all of it.
void PrefixTree::shrink(NodeId node) {
  Node& here = nodes_[node];
  std::size_t longest = 0;
  for (const Holder& holder : here.holders) longest = std::max<std::size_t>(longest, holder.length);
  if (longest > 0) {
    here.edge.resize(longest);
    return;
  }
  const NodeId parent = here.parent;
  by_first_key_.erase(here.edge.front());
  unlink_child(node);
  here = Node{};
  free_nodes_.push_back(node);
  if (parent != kRoot) merge_with_only_child(parent);
}

PrefixTree::NodeId PrefixTree::append_node(NodeId parent, const Key* keys, std::size_t num_keys) {
  NodeId node;
  if (free_nodes_.empty()) {
    node = static_cast<NodeId>(nodes_.size());
    nodes_.emplace_back();
  } else {
    node = free_nodes_.back();
    free_nodes_.pop_back();
  }
  nodes_[node].edge.assign(keys, keys + num_keys);
  by_first_key_[keys[0]] = node;
  link_child(parent, node);
  return node;
}

void PrefixTree::link_child(NodeId parent, NodeId node) {
  Node& here = nodes_[node];
  here.parent = parent;
  here.previous_sibling = kNone;
  here.next_sibling = nodes_[parent].first_child;
  if (here.next_sibling != kNone) nodes_[here.next_sibling].previous_sibling = node;
  nodes_[parent].first_child = node;
}

void PrefixTree::unlink_child(NodeId node) {
  const Node& here = nodes_[node];
  if (here.next_sibling != kNone) nodes_[here.next_sibling].previous_sibling = here.previous_sibling;
  if (here.previous_sibling != kNone) {
    nodes_[here.previous_sibling].next_sibling = here.next_sibling;
  } else {
    nodes_[here.parent].first_child = here.next_sibling;
  }
}

/// Puts a new parent with the first `length` keys above the node, which keeps the rest.
void PrefixTree::split(NodeId node, std::size_t length) {
  const std::vector<Key> edge = std::move(nodes_[node].edge);
  const NodeId grandparent = nodes_[node].parent;
  unlink_child(node);
  const NodeId upper = append_node(grandparent, edge.data(), length);
  nodes_[node].edge.assign(edge.begin() + length, edge.end());
  by_first_key_[edge[length]] = node;
  link_child(upper, node);

  std::vector<Holder> lower_holders;
  for (Holder holder : nodes_[node].holders) {
    if (holder.length <= length) {
      entries_[holder.entry].node = upper;
      nodes_[upper].holders.push_back(holder);
      continue;
    }
    const EntryId entry = new_entry(upper, holder.worker, entries_[holder.entry].last_use);
    link_before(entry, holder.entry);
    nodes_[upper].holders.push_back(Holder{holder.worker, static_cast<std::uint32_t>(length), entry});
    lower_holders.push_back(Holder{holder.worker, holder.length - static_cast<std::uint32_t>(length), holder.entry});
  }
  nodes_[node].holders = std::move(lower_holders);
}

bool PrefixTree::touched_together(const Node& node, const Node& only_child) const {
  if (node.holders.size() != only_child.holders.size()) return false;
  for (std::size_t i = 0; i < node.holders.size(); ++i) {
    const Holder &upper = node.holders[i], &lower = only_child.holders[i];
    if (upper.worker != lower.worker || entries_[upper.entry].older != lower.entry) return false;
    if (entries_[upper.entry].last_use != entries_[lower.entry].last_use) return false;
  }
  return true;
}

void PrefixTree::merge_with_only_child(NodeId node) {
  const NodeId lower = nodes_[node].first_child;
  if (lower == kNone || nodes_[lower].next_sibling != kNone) return;
  if (!touched_together(nodes_[node], nodes_[lower])) return;
  Node& upper = nodes_[node];
  Node& gone = nodes_[lower];
  for (std::size_t i = 0; i < upper.holders.size(); ++i) {
    upper.holders[i].length += gone.holders[i].length;
    unlink(gone.holders[i].entry);
    free_entries_.push_back(gone.holders[i].entry);
  }
  by_first_key_.erase(gone.edge.front());
  upper.edge.insert(upper.edge.end(), gone.edge.begin(), gone.edge.end());
  upper.first_child = gone.first_child;
  for (NodeId grandchild = upper.first_child; grandchild != kNone; grandchild = nodes_[grandchild].next_sibling) {
    nodes_[grandchild].parent = node;
  }
  gone = Node{};
  free_nodes_.push_back(lower);
}

PrefixTree::EntryId PrefixTree::new_entry(NodeId node, Worker worker, double last_use) {
  const Entry entry{node, worker, kNone, kNone, last_use};
  if (free_entries_.empty()) {
    entries_.push_back(entry);
    return static_cast<EntryId>(entries_.size() - 1);
  }
  const EntryId id = free_entries_.back();
  free_entries_.pop_back();
  entries_[id] = entry;
  return id;
}

void PrefixTree::link_newest(EntryId id) {
  Entry& entry = entries_[id];
  WorkerState& mine = workers_[entry.worker];
  entry.newer = kNone;
  entry.older = mine.newest;
  (mine.newest == kNone ? mine.oldest : entries_[mine.newest].newer) = id;
  mine.newest = id;
}

/// Makes the entry the next newer one after `older`.
void PrefixTree::link_before(EntryId id, EntryId older) {
  Entry& entry = entries_[id];
  entry.older = older;
  entry.newer = entries_[older].newer;
  (entry.newer == kNone ? workers_[entry.worker].newest : entries_[entry.newer].older) = id;
  entries_[older].newer = id;
}

void PrefixTree::unlink(EntryId id) {
  const Entry& entry = entries_[id];
  WorkerState& mine = workers_[entry.worker];
  (entry.newer == kNone ? mine.newest : entries_[entry.newer].older) = entry.older;
  (entry.older == kNone ? mine.oldest : entries_[entry.older].newer) = entry.newer;
}

std::size_t PrefixTree::num_bytes() const {
  constexpr std::size_t kMapNodeBytes = sizeof(Key) + sizeof(NodeId) + 3 * sizeof(void*);
  std::size_t total = nodes_.capacity() * sizeof(Node) + entries_.capacity() * sizeof(Entry) +
                      by_first_key_.size() * kMapNodeBytes + by_first_key_.bucket_count() * sizeof(void*);
  for (const Node& node : nodes_) {
    total += node.edge.capacity() * sizeof(Key) + node.holders.capacity() * sizeof(Holder);
  }
  return total;
}

void PrefixTree::check_invariants() const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(what);
  };
  std::vector<std::size_t> held(workers_.size(), 0);
  std::size_t num_holders = 0;
  for (NodeId id = 1; id < nodes_.size(); ++id) {
    const Node& node = nodes_[id];
    if (node.edge.empty()) continue;
    require(child(node.parent, node.edge.front()) == id, "a node is not found by its first key");
    std::size_t longest = 0;
    for (const Holder& holder : node.holders) {
      longest = std::max<std::size_t>(longest, holder.length);
      held[holder.worker] += holder.length;
      ++num_holders;
      require(entries_[holder.entry].node == id && entries_[holder.entry].worker == holder.worker,
              "an entry does not point back to its holder");
      if (node.parent == kRoot) continue;
      const Node& parent = nodes_[node.parent];
      const bool closed = std::any_of(parent.holders.begin(), parent.holders.end(), [&](const Holder& above) {
        return above.worker == holder.worker && above.length == parent.edge.size();
      });
      require(closed, "a worker holds a node but not all of its parent");
    }
    require(longest == node.edge.size(), "an edge is not held to its end");
  }
  std::size_t num_listed = 0;
  for (Worker worker = 0; worker < workers_.size(); ++worker) {
    require(held[worker] == workers_[worker].num_keys, "a worker's count of keys is wrong");
    require(held[worker] <= workers_[worker].capacity, "a worker holds more than its capacity");
    for (EntryId id = workers_[worker].newest; id != kNone; id = entries_[id].older) {
      ++num_listed;
      const EntryId older = entries_[id].older;
      require(older == kNone || entries_[older].last_use <= entries_[id].last_use, "a list is not by recency");
    }
  }
  require(num_listed == num_holders, "the recency lists and the tree disagree");
}

}  // namespace caudex::routing
