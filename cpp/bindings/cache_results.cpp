// What calls of a cache return: copies to execute, matches, counters, explanations.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>
#include <utility>

#include "arrays.hpp"
#include "cache/prefix_cache.hpp"

namespace nb = nanobind;

namespace caudex {
namespace {

const char* reason_name(MissReason reason) {
  switch (reason) {
    case MissReason::kComplete: return "complete";
    case MissReason::kEvicted: return "evicted";
    case MissReason::kOtherNamespace: return "other_namespace";
    case MissReason::kDiverged: return "diverged";
    case MissReason::kBelowBlock: return "below_block";
    case MissReason::kNeverSeen: break;
  }
  return "never_seen";
}

void bind_explanation(nb::module_& m) {
  nb::class_<Explanation>(m, "Explanation", "Why a prompt did not hit further.")
      .def_prop_ro("reason", [](const Explanation& self) { return reason_name(self.reason); },
                   "The most telling of 'complete', 'evicted', 'other_namespace', 'diverged', 'below_block', "
                   "'never_seen'.")
      .def_ro("num_tokens", &Explanation::num_tokens)
      .def_ro("num_cached", &Explanation::num_cached)
      .def_ro("evicted_seconds_ago", &Explanation::evicted_seconds_ago, "When the next block went.")
      .def_ro("policy", &Explanation::policy, "The policy that chose it.")
      .def_ro("num_evicted", &Explanation::num_evicted, "Tokens that would have followed, as far as remembered.")
      .def_ro("other_namespace", &Explanation::other_space, "Where more of the prompt is cached.")
      .def_ro("num_cached_there", &Explanation::num_cached_there)
      .def_ro("diverged_at", &Explanation::diverged_at, "The first token that differs from the closest cached prompt.")
      .def_prop_ro("expected_tokens", [](const Explanation& self) { return to_numpy(self.expected); },
                   nb::rv_policy::move, "How that one goes on there, a few tokens.");
}

}  // namespace

void bind_results(nb::module_& m) {
  bind_explanation(m);
  nb::class_<BlockCopy>(m, "BlockCopy",
                        "Copy the KV of the first `num_slots` slots of block `src` to block `dst`.")
      .def_ro("src", &BlockCopy::source)
      .def_ro("dst", &BlockCopy::destination)
      .def_ro("num_slots", &BlockCopy::num_slots)
      .def("__repr__", [](const BlockCopy& c) {
        return "BlockCopy(src=" + std::to_string(c.source) + ", dst=" + std::to_string(c.destination) +
               ", num_slots=" + std::to_string(c.num_slots) + ")";
      });
  nb::class_<Match>(m, "Match", "The longest cached prefix of a prompt, as a look-up found it. Nothing is pinned by it.")
      .def_ro("num_tokens", &Match::num_tokens, "Cached tokens, at most one less than were asked for.")
      .def_ro("num_whole", &Match::num_whole, "Those of them that lie in whole blocks.")
      .def_prop_ro("blocks", [](const Match& self) { return to_numpy(self.blocks); }, nb::rv_policy::move,
                   "The whole blocks, in order.")
      .def_prop_ro(
          "partial",
          [](const Match& self) -> std::optional<std::pair<BlockId, Position>> {
            if (self.partial_block == kNoBlock) return std::nullopt;
            return std::pair(self.partial_block, self.num_tokens - self.num_whole);
          },
          "(block, slots): the rest lies in the first slots of that block, to be copied; None if there is no rest.");
  nb::class_<Stats>(m, "CacheStats",
                    "Exact counters since the cache was made. lookup_tokens = hit_whole_tokens + hit_partial_tokens + "
                    "missed_tokens.")
      .def_ro("requests", &Stats::requests, "Requests begun; resumed ones are counted apart.")
      .def_ro("lookup_tokens", &Stats::lookup_tokens, "Tokens of their prompts.")
      .def_ro("hit_whole_tokens", &Stats::hit_whole_tokens, "Found in whole blocks, which are shared.")
      .def_ro("hit_partial_tokens", &Stats::hit_partial_tokens, "Found in the first slots of a block, which are copied.")
      .def_prop_ro("missed_tokens", &Stats::missed_tokens, "To be computed.")
      .def_ro("resumed_requests", &Stats::resumed_requests, "Requests begun again after a preemption.")
      .def_ro("resumed_tokens", &Stats::resumed_tokens)
      .def_ro("resumed_hit_tokens", &Stats::resumed_hit_tokens)
      .def_ro("committed_tokens", &Stats::committed_tokens, "Computed, of prompts and outputs: committed beyond the hit.")
      .def_ro("adopted_blocks", &Stats::adopted_blocks, "Given back at commit because an equal block was there.")
      .def_ro("evicted_blocks", &Stats::evicted_blocks)
      .def_ro("evicted_tokens", &Stats::evicted_tokens)
      .def_ro("thrashed_tokens", &Stats::thrashed_tokens, "Computed again within the window of their eviction.");
  nb::class_<Occupancy>(m, "Occupancy", "What lies in the pool right now.")
      .def_ro("pinned_blocks", &Occupancy::pinned_blocks)
      .def_ro("cached_blocks", &Occupancy::cached_blocks)
      .def_ro("unused_slots", &Occupancy::unused_slots, "Allocated and not filled: internal fragmentation.")
      .def_ro("repeated_slots", &Occupancy::repeated_slots,
              "Copies of slots that another block holds too, where prompts part inside a block.");
}

}  // namespace caudex
