// Nodes of the tree, and the store they live in.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cache/block_run.hpp"
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
struct Node {
  NodeId parent = kNoNode;
  NodeId first_child = kNoNode;
  NodeId next_sibling = kNoNode;
  NodeId previous_sibling = kNoNode;
  Position start = 0;
  Position end = 0;
  std::uint32_t locks = 0;    // running requests whose path goes through or ends here
  std::uint32_t anchors = 0;  // those that end here
  SpaceId space = 0;
  std::uint32_t audience = 0;  // who may see it; see sharing.hpp
  bool growing = false;        // a running request made this leaf, and nobody else has ended here
  std::uint64_t unpinned = 0;  // a count that orders nodes by when they were last unpinned
  std::uint64_t key = 0;       // its key in the child table
  BlockRun blocks;

  bool is_leaf() const { return first_child == kNoNode; }
  bool is_pinned() const { return locks > 0; }
  bool is_root() const { return parent == kNoNode; }
  bool has_only_child(const Node& child) const {
    return child.next_sibling == kNoNode && child.previous_sibling == kNoNode;
  }
};

// Nodes by id, in chunks, so that growing never moves one. Ids of removed nodes are used again.
class NodeStore {
 public:
  NodeStore() { add(); }  // kNoNode

  Node& operator[](NodeId id) { return chunks_[id >> kChunkBits][id & (kChunkSize - 1)]; }
  const Node& operator[](NodeId id) const { return chunks_[id >> kChunkBits][id & (kChunkSize - 1)]; }

  NodeId add() {
    if (!free_.empty()) {
      NodeId id = free_.back();
      free_.pop_back();
      return id;
    }
    if (capacity_ >> kChunkBits == chunks_.size()) {
      chunks_.push_back(std::make_unique<Node[]>(kChunkSize));
      free_.reserve(chunks_.size() * kChunkSize);  // so that remove() cannot throw
    }
    return capacity_++;
  }

  void remove(NodeId id) {
    (*this)[id] = Node{};
    free_.push_back(id);
  }

  // One more than the largest id ever handed out: the size of an array indexed by node.
  std::uint32_t capacity() const { return capacity_; }
  std::uint32_t count() const { return capacity_ - 1 - static_cast<std::uint32_t>(free_.size()); }

 private:
  static constexpr std::uint32_t kChunkBits = 10;
  static constexpr std::uint32_t kChunkSize = 1u << kChunkBits;

  std::vector<std::unique_ptr<Node[]>> chunks_;
  std::vector<NodeId> free_;
  std::uint32_t capacity_ = 0;
};

}  // namespace caudex
