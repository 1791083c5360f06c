// Nodes of the tree, and the store they live in.
#pragma once

#include <array>
#include <cstdint>
#include <new>

#include "cache/block_run.hpp"
#include "cache/lazy_array.hpp"
#include "cache/types.hpp"

namespace caudex {

// A node is a stretch of tokens [start, end) that hangs below its parent, which ends at `start`.
//
//     tokens      0 . . . | . . . . | . . . . | . . . .        block size 4
//     parent      [0 ----------- 6)
//     child                      [6 ------------- 14)
//     its blocks          [4 .. 8) [8 .. 12) [12 .. 14)
//
// A node that starts inside a block owns a block that repeats the slots before its start, so a child's blocks can be
// read without its parent's. A node that ends inside a block owns that last, partly filled block only while it is a
// leaf or a running request's own end; otherwise the slots are found in any child's first block.
//
// One cache line, what a look-up reads in its first half.
struct alignas(64) Node {
  NodeId parent = kNoNode;
  NodeId first_child = kNoNode;
  Position start = 0;
  Position end = 0;
  std::uint32_t label = 0;  // tells it from its siblings, see BlockTree::label_of
  BlockRun blocks;
  std::uint32_t audience = 0;  // who may see it; see sharing.hpp
  SpaceId space = 0;
  NodeId next_sibling = kNoNode;
  NodeId previous_sibling = kNoNode;
  std::uint32_t locks = 0;        // running requests whose path goes through or ends here
  std::uint32_t anchors : 31;     // those that end here
  std::uint32_t growing : 1;      // a running request made this leaf, and nobody else has ended here
  std::uint64_t unpinned = 0;     // a count that orders nodes by when they were last unpinned

  Node() : anchors(0), growing(0) {}
  bool is_leaf() const { return first_child == kNoNode; }
  bool is_pinned() const { return locks > 0; }
  bool is_root() const { return parent == kNoNode; }
  bool has_only_child(const Node& child) const {
    return child.next_sibling == kNoNode && child.previous_sibling == kNoNode;
  }
};
static_assert(sizeof(Node) == 64, "a node is one cache line");

// Nodes by id, in chunks, each as large as all before it, so that growing never moves one. Ids of removed nodes are used
// again, the last one first.
class NodeStore {
 public:
  NodeStore() { add(); }  // kNoNode
  ~NodeStore() {
    for (NodeId id = 0; id < capacity_; ++id) (*this)[id].~Node();
  }
  NodeStore(const NodeStore&) = delete;
  NodeStore& operator=(const NodeStore&) = delete;

  Node& operator[](NodeId id) { return *std::launder(reinterpret_cast<Node*>(&chunk_of(id)[place_of(id)])); }
  const Node& operator[](NodeId id) const {
    return *std::launder(reinterpret_cast<const Node*>(&chunk_of(id)[place_of(id)]));
  }

  NodeId add() {
    if (last_removed_ != kNoNode) {
      const NodeId id = last_removed_;
      last_removed_ = (*this)[id].next_sibling;
      (*this)[id].next_sibling = kNoNode;
      --num_removed_;
      return id;
    }
    auto& chunk = chunk_of(capacity_);
    if (chunk.size() == 0) chunk = LazyArray<Place>(std::size_t{1} << highest_bit(capacity_));
    new (&chunk[place_of(capacity_)]) Node;
    return capacity_++;
  }

  void remove(NodeId id) {
    Node& node = (*this)[id];
    node.~Node();
    new (&node) Node;
    node.next_sibling = last_removed_;
    last_removed_ = id;
    ++num_removed_;
  }

  // One more than the largest id ever handed out: the size of an array indexed by node.
  std::uint32_t capacity() const { return capacity_; }
  std::uint32_t count() const { return capacity_ - 1 - num_removed_; }

 private:
  struct alignas(64) Place {
    unsigned char bytes[sizeof(Node)];
  };
  static constexpr std::uint32_t kFirstBits = 6;

  //     id    0 ....... 63 | 64 ...... 191 | 192 ........ 447 | ...       id + 64 has one bit more from chunk to chunk
  //     chunk 0            | 1             | 2                |
  static std::uint32_t highest_bit(NodeId id) { return 31 - static_cast<std::uint32_t>(__builtin_clz(id + (1u << kFirstBits))); }
  static std::uint32_t place_of(NodeId id) { return id + (1u << kFirstBits) - (1u << highest_bit(id)); }
  LazyArray<Place>& chunk_of(NodeId id) { return chunks_[highest_bit(id) - kFirstBits]; }
  const LazyArray<Place>& chunk_of(NodeId id) const { return chunks_[highest_bit(id) - kFirstBits]; }

  std::array<LazyArray<Place>, 32 - kFirstBits> chunks_;
  std::uint32_t capacity_ = 0;
  std::uint32_t num_removed_ = 0;
  NodeId last_removed_ = kNoNode;  // each removed node names the one before as its next sibling
};

}  // namespace caudex
