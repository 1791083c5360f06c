#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace caudex::offline {

using Block = std::uint32_t;  // a distinct block, numbered in order of first appearance
using BranchId = std::uint32_t;
inline constexpr BranchId kNoBranch = UINT32_MAX;

// One request's blocks from the root on: `length` of them, the last of which lies in `branch`. Empty: in none.
struct Path {
  BranchId branch = kNoBranch;
  std::uint32_t length = 0;
};

// The part of a path that lies in one branch: `length` blocks numbered from `begin` on, with `depth` blocks before them.
struct Stretch {
  Block begin;
  std::uint32_t length;
  std::uint32_t depth;
  BranchId branch;
};

// The distinct blocks of a log as a tree, each there once. Whoever has a block has all blocks before it, so what a
// request is the first to have is the end of its path: a *branch*, whose blocks are numbered in a row.
//
//   request 0   a b c d e f       branch 0: blocks 0 to 5, from the root          0 1 2 3 4 5
//   request 1   a b c x y         branch 1: blocks 6 and 7, behind block 2              6 7
//   request 2   a b c x y z       branch 2: block 8, behind block 7                         8
//
// So a path is two numbers, and its blocks are a few stretches of consecutive ones. A branch is used from its beginning
// on by everyone who uses it at all. 16 bytes a branch, nothing a block.
class PathTree {
 public:
  struct Branch {
    Block begin = 0;
    BranchId parent = kNoBranch;
    std::uint32_t depth = 0;    // blocks before its first, on the path
    std::uint32_t creator = 0;  // the request that was the first to have its blocks
  };

  BranchId add(BranchId parent, std::uint32_t depth, std::uint32_t length, std::uint32_t creator) {
    branches_.push_back({num_blocks_, parent, depth, creator});
    num_blocks_ += length;
    return static_cast<BranchId>(branches_.size() - 1);
  }

  const Branch& operator[](BranchId branch) const { return branches_[branch]; }
  Block end(BranchId branch) const {
    return branch + 1 < branches_.size() ? branches_[branch + 1].begin : num_blocks_;
  }
  std::uint32_t num_branches() const { return static_cast<std::uint32_t>(branches_.size()); }
  std::uint32_t num_blocks() const { return num_blocks_; }

  // The stretches of a path, the last first: visit(stretch). O(1) each.
  template <class Visit>
  void for_each_upward(Path path, Visit visit) const {
    std::uint32_t end = path.length;
    for (BranchId id = path.branch; id != kNoBranch; id = branches_[id].parent) {
      const Branch& branch = branches_[id];
      visit(Stretch{branch.begin, end - branch.depth, branch.depth, id});
      end = branch.depth;
    }
  }

  // The same into a vector, the root's first.
  void stretches(Path path, std::vector<Stretch>& into) const {
    into.clear();
    for_each_upward(path, [&](const Stretch& stretch) { into.push_back(stretch); });
    std::reverse(into.begin(), into.end());
  }

  // The path's beginning of at most `length` blocks.
  Path cut(Path path, std::uint32_t length) const {
    if (length >= path.length) return path;
    while (path.branch != kNoBranch && branches_[path.branch].depth >= length) path.branch = branches_[path.branch].parent;
    return {path.branch, length};
  }

 private:
  std::vector<Branch> branches_;
  Block num_blocks_ = 0;
};

}  // namespace caudex::offline
