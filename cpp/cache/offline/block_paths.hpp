#pragma once

#include <cstdint>
#include <vector>

#include "cache/offline/path_tree.hpp"

namespace caudex::offline {

// A request log as a prefix cache sees it: every distinct block once, and for each request where its path ends. Paths
// hold full blocks only.
//
//   path of request i:   | full block | full block | full block |        (a partial one may follow; nobody can use it)
//                        |<-- reusable -->|                              leaves one token to compute, told apart
struct BlockPaths {
  PathTree tree;
  std::vector<Path> paths;  // by request

  std::uint32_t num_requests() const { return static_cast<std::uint32_t>(paths.size()); }
};

// The same requests in blocks that are `factor` of the given ones; what fills no whole block is left out. The tree of
// the larger blocks follows from the tree of the smaller: such a block is told apart by where it ends.
BlockPaths coarsened(const PathTree& tree, const std::vector<Path>& paths, std::uint32_t factor);

// For each request, its leading blocks that an earlier request of the same label has had. O(branches) memory.
std::vector<std::int64_t> reuse_within(const BlockPaths& log, const std::int64_t* labels);

// Of the first `served[i]` blocks of each request, those that were not there yet when it came at `arrivals[i]`: the
// request that was the first to have them was done at a later time.
std::int64_t blocks_in_flight(const BlockPaths& log, const double* arrivals, const double* done,
                              const std::int64_t* served);

// Blocks that the same requests share, as a tree: every column has a row a run, parents before children.
struct SharedRuns {
  std::vector<std::int64_t> parents;  // by row, -1 for a run that begins at the root
  std::vector<std::int64_t> starts;   // depth of the first block
  std::vector<std::int64_t> ends;
  std::vector<std::int64_t> requests;  // how many share it, two or more
  std::vector<std::int64_t> weights;  // blocks of these requests from `starts` on
  std::vector<std::int64_t> samples;  // the first of these requests
};

// Those of at least that weight. O(requests + branches) time and memory, and O(log) for each branch to sort them.
SharedRuns shared_runs(const BlockPaths& log, std::int64_t least_weight);

}  // namespace caudex::offline
