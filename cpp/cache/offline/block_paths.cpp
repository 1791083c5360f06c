#include "cache/offline/block_paths.hpp"

#include <numeric>

namespace caudex::offline {
namespace {

// Carries a tree and its paths over to larger blocks.
//
//   depth in small blocks    0 1 2 3 4 5 6 7 8 9           factor 4
//   a branch from 3 to 9           [- - - - - -)           ends the larger blocks 0 (at 4) and 1 (at 8)
//   its larger blocks        [- - - -|- - - -)
//
// A branch that ends no larger block has no counterpart, and what hangs behind it hangs behind an ancestor's.
class Coarsening {
 public:
  Coarsening(const PathTree& fine, std::uint32_t factor) : fine_(fine), factor_(factor), coarse_ids_(fine.num_branches()) {
    for (BranchId id = 0; id < fine.num_branches(); ++id) add(id);
  }

  // The larger blocks that a path fills.
  Path carried(Path path) const {
    const std::uint32_t length = path.length / factor_;
    if (length == 0) return {};
    return {coarse_ids_[fine_.cut(path, length * factor_).branch], length};
  }

  PathTree take() { return std::move(coarse_); }

 private:
  void add(BranchId id) {
    const PathTree::Branch& branch = fine_[id];
    const std::uint32_t depth = branch.depth / factor_;
    const std::uint32_t end = (branch.depth + (fine_.end(id) - branch.begin)) / factor_;
    if (end == depth) return;
    const Path before = carried({branch.parent, branch.depth});
    coarse_ids_[id] = coarse_.add(before.branch, depth, end - depth, branch.creator);
  }

  const PathTree& fine_;
  std::uint32_t factor_;
  PathTree coarse_;
  std::vector<BranchId> coarse_ids_;  // of branches that end a larger block
};

}  // namespace

BlockPaths coarsened(const PathTree& tree, const std::vector<Path>& paths, std::uint32_t factor) {
  if (factor == 1) return {tree, paths};
  Coarsening coarsening(tree, factor);
  BlockPaths log;
  log.paths.reserve(paths.size());
  for (const Path& path : paths) log.paths.push_back(coarsening.carried(path));
  log.tree = coarsening.take();
  return log;
}

std::vector<std::int64_t> reuse_within(const BlockPaths& log, const std::int64_t* labels) {
  std::vector<std::uint32_t> order(log.num_requests());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return labels[a] < labels[b]; });

  struct Reach {
    std::uint32_t blocks = 0;  // of the branch, from its beginning on, that the label's requests have had
    std::uint32_t turn = 0;
  };
  std::vector<Reach> reached(log.tree.num_branches());
  std::vector<std::int64_t> known(log.num_requests());
  std::vector<Stretch> path;
  std::uint32_t turn = 0;
  for (std::size_t k = 0; k < order.size(); ++k) {
    if (k == 0 || labels[order[k]] != labels[order[k - 1]]) ++turn;
    log.tree.stretches(log.paths[order[k]], path);
    bool leading = true;
    for (const Stretch& stretch : path) {
      Reach& reach = reached[stretch.branch];
      if (reach.turn != turn) reach = {0, turn};
      if (leading) known[order[k]] += std::min(reach.blocks, stretch.length);
      leading = leading && reach.blocks >= stretch.length;
      reach.blocks = std::max(reach.blocks, stretch.length);
    }
  }
  return known;
}

std::int64_t blocks_in_flight(const BlockPaths& log, const double* arrivals, const double* done,
                              const std::int64_t* served) {
  std::int64_t count = 0;
  for (std::uint32_t i = 0; i < log.num_requests(); ++i) {
    const auto limit = static_cast<std::uint32_t>(std::min<std::int64_t>(served[i], log.paths[i].length));
    log.tree.for_each_upward(log.tree.cut(log.paths[i], limit), [&](const Stretch& stretch) {
      const std::uint32_t creator = log.tree[stretch.branch].creator;
      if (creator != i && arrivals[i] < done[creator]) count += stretch.length;
    });
  }
  return count;
}

namespace {

// How many requests go through each block, branch by branch, and the runs over which that number does not change.
//
//   blocks of a branch     0 1 2 3 4 5 6 7
//   requests that end                2     1         (here or in branches that hang behind that block)
//   so go through it       3 3 3 3 3 1 1 1           runs 0-4 with 3 requests and 5-7 with 1
class RunFinder {
 public:
  RunFinder(const BlockPaths& log, std::int64_t least_weight)
      : tree_(log.tree), least_weight_(least_weight), leavings_(tree_.num_branches()), rows_(tree_.num_branches()) {
    for (const Path& path : log.paths) {
      if (path.length > 0) leave(path.branch, path.length, 1, 0);
    }
    for (BranchId id = tree_.num_branches(); id-- > 0;) hand_up(id);
    for (BranchId id = 0; id < tree_.num_branches(); ++id) list(id);
  }

  SharedRuns take() { return std::move(runs_); }

 private:
  // Requests that have left a branch when `depth` blocks lie behind them, and the blocks they have beyond.
  struct Leaving {
    std::uint32_t depth;
    std::uint32_t requests;
    std::int64_t beyond;
  };

  // The last run of a branch that is listed, and where it ends: rows of a branch follow each other.
  struct Rows {
    std::int64_t first = -1;
    std::int64_t end = -1;
  };

  void leave(BranchId id, std::uint32_t depth, std::uint32_t requests, std::int64_t beyond) {
    leavings_[id].push_back({depth, requests, beyond});
  }

  // What left a branch also went through its parent up to where the branch hangs. Children come after their parents.
  void hand_up(BranchId id) {
    std::vector<Leaving>& leavings = leavings_[id];
    std::sort(leavings.begin(), leavings.end(), [](const Leaving& a, const Leaving& b) { return a.depth < b.depth; });
    const PathTree::Branch& branch = tree_[id];
    if (branch.parent == kNoBranch) return;
    std::uint32_t requests = 0;
    std::int64_t beyond = 0;
    for (const Leaving& leaving : leavings) {
      requests += leaving.requests;
      beyond += leaving.beyond + std::int64_t{leaving.requests} * (leaving.depth - branch.depth);
    }
    leave(branch.parent, branch.depth, requests, beyond);
  }

  void list(BranchId id) {
    const PathTree::Branch& branch = tree_[id];
    const std::vector<Leaving>& leavings = leavings_[id];
    std::int64_t requests = 0;
    std::int64_t weight = 0;
    for (const Leaving& leaving : leavings) {
      requests += leaving.requests;
      weight += leaving.beyond + std::int64_t{leaving.requests} * (leaving.depth - branch.depth);
    }
    std::int64_t parent = branch.parent == kNoBranch ? -1 : row_at(branch.parent, branch.depth);
    if (branch.parent != kNoBranch && parent < 0) return;
    std::uint32_t start = branch.depth;
    for (std::size_t k = 0; k < leavings.size() && requests >= 2 && weight >= least_weight_;) {
      const std::uint32_t end = leavings[k].depth;
      parent = add(id, parent, start, end, requests, weight);
      weight -= requests * (end - start);
      for (; k < leavings.size() && leavings[k].depth == end; ++k) {
        requests -= leavings[k].requests;
        weight -= leavings[k].beyond;
      }
      start = end;
    }
  }

  std::int64_t add(BranchId id, std::int64_t parent, std::uint32_t start, std::uint32_t end, std::int64_t requests,
                   std::int64_t weight) {
    const auto row = static_cast<std::int64_t>(runs_.starts.size());
    runs_.parents.push_back(parent);
    runs_.starts.push_back(start);
    runs_.ends.push_back(end);
    runs_.requests.push_back(requests);
    runs_.weights.push_back(weight);
    runs_.samples.push_back(tree_[id].creator);
    if (rows_[id].first < 0) rows_[id].first = row;
    rows_[id].end = row + 1;
    return row;
  }

  // The run of a branch that ends at that depth, or -1 if it is not listed. A child hangs behind its last block, since
  // requests leave there.
  std::int64_t row_at(BranchId id, std::uint32_t depth) const {
    if (rows_[id].first < 0) return -1;
    const auto first = runs_.ends.begin() + rows_[id].first;
    const auto end = runs_.ends.begin() + rows_[id].end;
    const auto found = std::lower_bound(first, end, std::int64_t{depth});
    return found == end || *found != depth ? -1 : found - runs_.ends.begin();
  }

  const PathTree& tree_;
  std::int64_t least_weight_;
  std::vector<std::vector<Leaving>> leavings_;  // by branch
  std::vector<Rows> rows_;                      // by branch
  SharedRuns runs_;
};

}  // namespace

SharedRuns shared_runs(const BlockPaths& log, std::int64_t least_weight) {
  return RunFinder(log, least_weight).take();
}

}  // namespace caudex::offline
