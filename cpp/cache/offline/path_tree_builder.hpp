#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "cache/offline/branch_symbols.hpp"
#include "cache/offline/path_tree.hpp"

namespace caudex::offline {

// Builds a PathTree from paths of symbols: token ids, or the block ids of a hash trace. A symbol means what it means
// behind the symbols before it; the same one behind two different paths makes two blocks, so ids whose parents disagree
// are told apart. Paths from different roots (namespaces) share nothing.
//
// A path costs one comparison of memory, and one table probe for each branch on it. Memory: what `Symbols` keeps of the
// distinct symbols, and at most 64 bytes a branch, of which a request makes one at most.
template <class Symbol, class Symbols = WholeSymbols<Symbol>>
class PathTreeBuilder {
 public:
  struct Added {
    Path path;
    std::uint32_t known;  // its leading blocks that earlier paths have had
  };

  PathTreeBuilder() : slots_(64) {}

  const PathTree& tree() const { return tree_; }
  const Symbols& symbols() const { return symbols_; }
  std::size_t bytes() const {
    return symbols_.bytes() + slots_.size() * sizeof(Slot) + tree_.num_branches() * sizeof(PathTree::Branch);
  }

  // The caller guarantees that `request` is no smaller than in the call before.
  Added add(const Symbol* path, std::size_t length, std::uint32_t root, std::uint32_t request) {
    if (length > kMost) throw std::length_error("a path is too long");
    BranchId branch = kNoBranch;
    std::uint64_t behind = kRoots + root;
    std::size_t depth = 0;
    while (depth < length) {
      const BranchId next = find(behind, path[depth]);
      if (next == kNoBranch) break;
      const Block begin = tree_[next].begin;
      const std::size_t common =
          symbols_.common_prefix(path + depth, length - depth, next, begin, tree_.end(next) - begin);
      branch = next;
      depth += common;
      behind = begin + common - 1;
    }
    const auto known = static_cast<std::uint32_t>(depth);
    if (depth < length) branch = grow(branch, behind, path + depth, known, static_cast<std::uint32_t>(length), request);
    return {{branch, static_cast<std::uint32_t>(length)}, known};
  }

 private:
  static constexpr std::uint64_t kRoots = std::uint64_t{1} << 32;  // what follows root r follows kRoots + r
  static constexpr std::size_t kMost = UINT32_MAX - 1;

  // A branch, found by what it follows and its first symbol; the tag is a part of their hash that the place does not
  // tell.
  struct Slot {
    std::uint32_t tag = 0;
    BranchId branch = kNoBranch;
  };

  static std::uint64_t hash(std::uint64_t behind, Symbol first) {
    std::uint64_t x = behind * 0x9E3779B97F4A7C15u ^ static_cast<std::uint64_t>(first);
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdu;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53u;
    return x ^ (x >> 33);
  }

  std::size_t mask() const { return slots_.size() - 1; }

  // Whether that branch follows `behind` and begins with that symbol.
  bool is(BranchId id, std::uint64_t behind, Symbol first) const {
    return behind_[id] == behind && symbols_.first(id, tree_[id].begin) == first;
  }

  BranchId find(std::uint64_t behind, Symbol first) const {
    const std::uint64_t h = hash(behind, first);
    const auto tag = static_cast<std::uint32_t>(h >> 32);
    for (std::size_t i = h & mask(); slots_[i].branch != kNoBranch; i = (i + 1) & mask()) {
      if (slots_[i].tag == tag && is(slots_[i].branch, behind, first)) return slots_[i].branch;
    }
    return kNoBranch;
  }

  BranchId grow(BranchId parent, std::uint64_t behind, const Symbol* symbols, std::uint32_t depth, std::uint32_t length,
                std::uint32_t request) {
    const std::uint32_t count = length - depth;
    if (count > kMost - tree_.num_blocks()) throw std::length_error("a log of more than 4 billion distinct blocks");
    symbols_.append(symbols, count);
    behind_.push_back(behind);
    const BranchId branch = tree_.add(parent, depth, count, request);
    if (2 * std::size_t{tree_.num_branches()} > slots_.size()) rehash();
    else place(branch);
    return branch;
  }

  void place(BranchId branch) {
    const std::uint64_t h = hash(behind_[branch], symbols_.first(branch, tree_[branch].begin));
    std::size_t i = h & mask();
    while (slots_[i].branch != kNoBranch) i = (i + 1) & mask();
    slots_[i] = {static_cast<std::uint32_t>(h >> 32), branch};
  }

  void rehash() {
    slots_.assign(2 * slots_.size(), Slot{});
    for (BranchId branch = 0; branch < tree_.num_branches(); ++branch) place(branch);
  }

  PathTree tree_;
  Symbols symbols_;
  std::vector<std::uint64_t> behind_;   // by branch: the block that it follows, or kRoots + root
  std::vector<Slot> slots_;             // at most half full
};

}  // namespace caudex::offline
