#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "routing/chain_keys.hpp"

namespace caudex::routing {

/// Which worker was sent which prefixes: one path-compressed tree for all workers.
///
/// A node's edge is a run of chain keys. A worker holds the first `length` keys of an edge:
///
///     edge      k0 k1 k2 k3 k4 k5
///     worker 7  ================     length 6: may hold children too
///     worker 9  ======               length 2: holds no child
///
/// Invariants
///   - A worker that holds any key of a node holds the parent's whole edge (its holdings are closed under prefix).
///   - Every edge is held to its end by some worker, so the tree is never larger than the sum of what workers hold,
///     and each worker holds at most its capacity.
///   - A worker's entries form a list by recency in which an ancestor comes before its descendants, so the list's tail
///     is always a leaf for that worker and least-recently-used eviction is O(1) a step.
///   - A node with one child that was touched with it, by the same workers, is merged with it.
///
/// A match costs one comparison a key and one step a (node, holder) on the path. Not thread-safe.
class PrefixTree {
 public:
  using Worker = std::uint32_t;

  explicit PrefixTree(std::size_t default_capacity);

  /// The most keys that `worker` may hold; evicts down to it at once.
  void set_capacity(Worker worker, std::size_t num_keys);

  /// Writes, for each worker below `num_workers`, how many leading keys of `keys` it holds.
  void match(const Key* keys, std::size_t num_keys, std::int32_t* out, std::size_t num_workers) const;

  /// Records that `worker` was sent `keys` at time `now` (seconds, never decreasing).
  void insert(Worker worker, const Key* keys, std::size_t num_keys, double now);

  /// Drops what `worker` was last sent before `time`.
  void expire(Worker worker, double time);

  /// The same for every worker; O(workers) where nothing is that old.
  void expire_all(double time);

  /// Drops all that `worker` holds.
  void forget(Worker worker);

  std::size_t num_keys(Worker worker) const;

  /// Writes the number of keys held by each worker below `num_workers`.
  void held(std::int64_t* out, std::size_t num_workers) const;

  std::size_t num_nodes() const { return nodes_.size() - free_nodes_.size() - 1; }
  std::size_t num_bytes() const;

  /// The tree as bytes for `load`; a string that `load` did not get from `dump` raises std::invalid_argument.
  std::string dump() const;
  void load(const std::string& bytes);

  /// Throws std::logic_error naming the first invariant that does not hold.
  void check_invariants() const;

 private:
  using NodeId = std::uint32_t;
  using EntryId = std::uint32_t;
  static constexpr std::uint32_t kNone = 0xFFFFFFFFU;
  static constexpr NodeId kRoot = 0;

  struct Holder {
    Worker worker;
    std::uint32_t length;
    EntryId entry;
  };

  struct Node {
    NodeId parent = kNone;
    NodeId first_child = kNone;
    NodeId next_sibling = kNone;
    NodeId previous_sibling = kNone;
    std::vector<Key> edge;
    std::vector<Holder> holders;  // by worker, ascending
  };

  /// One (node, worker) pair in that worker's recency list.
  struct Entry {
    NodeId node;
    Worker worker;
    EntryId newer;
    EntryId older;
    double last_use;
  };

  struct WorkerState {
    EntryId newest = kNone;
    EntryId oldest = kNone;
    std::size_t num_keys = 0;
    std::size_t capacity = 0;
  };

  WorkerState& state(Worker worker);
  NodeId child(NodeId parent, Key first_key) const;
  Holder* find_holder(NodeId node, Worker worker);
  Holder& hold(NodeId node, Worker worker, std::uint32_t length, double now);
  void release(NodeId node, Worker worker);
  NodeId append_node(NodeId parent, const Key* keys, std::size_t num_keys);
  void link_child(NodeId parent, NodeId node);
  void unlink_child(NodeId node);
  void split(NodeId node, std::size_t length);
  void shrink(NodeId node);
  void merge_with_only_child(NodeId node);
  bool touched_together(const Node& node, const Node& only_child) const;
  void evict(Worker worker, std::size_t num_keys);
  void link_newest(EntryId entry);
  void link_before(EntryId entry, EntryId older);
  void unlink(EntryId entry);
  EntryId new_entry(NodeId node, Worker worker, double last_use);
  void dump_node(NodeId node, std::string& out) const;

  std::size_t default_capacity_;
  std::vector<Node> nodes_;
  std::vector<NodeId> free_nodes_;
  std::vector<Entry> entries_;
  std::vector<EntryId> free_entries_;
  std::vector<WorkerState> workers_;
  std::unordered_map<Key, NodeId> by_first_key_;  // a chain key names its whole prefix, so it names one node
};

}  // namespace caudex::routing
