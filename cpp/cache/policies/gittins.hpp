// Gittins index over learned reuse rates.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "cache/ghost_runs.hpp"
#include "cache/linked_lists.hpp"
#include "cache/policies/reuse_rates.hpp"
#include "cache/policy.hpp"

namespace caudex {

// Evicts the leaf whose blocks promise the fewest hits for each second that they are held.
//
// The blocks that one request touched last are a *group*; those of one node are a *segment* of it. A segment has a
// class, by how often its blocks were touched and at which turn its conversation is, and rates of reuse by age are
// learned online for each class (reuse_rates.hpp), from what is cached and from 8 x capacity evicted blocks (at most
// 262,144). Segments of one class, risk and age bucket wait in one queue, so that a victim is the front of the queue
// with the lowest index.
//
//   segment ages:   bucket 0 --timer--> bucket 1 --timer--> ...      one list a bucket, ordered by last touch
//   leaves wait:    queue (class, risk, bucket) -> index             one set of non-empty queues, ordered by index
//
// A segment lives as long as its node or any evicted block of it is remembered.
// Cost: O(1) a victim; O(log queues) a node and age bucket; a fit of the rates every kRequestsBetweenFits requests.
//
// Good for: conversations and agents, where how often and how regularly something came back tells when it will again.
// Not for: caches so small that each request evicts the one before, or traffic without repetition.
class GittinsPolicy final : public Policy {
 public:
  explicit GittinsPolicy(const PolicyContext& context);

  void end_request(const Request& request) override;
  void offer(NodeId node) override;
  void withdraw(NodeId node) override;
  void split(NodeId upper, NodeId lower) override;
  bool merge(NodeId upper, NodeId lower) override;
  Victim victim(std::uint32_t wanted) override;
  std::size_t bytes() const override;

 private:
  using SegmentId = std::uint32_t;
  using GroupId = std::uint32_t;
  static constexpr std::uint32_t kNone = UINT32_MAX;
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr std::uint64_t kRequestsBetweenFits = 64;
  static constexpr std::size_t kGhostsPerBlock = 8;
  static constexpr std::size_t kMostGhosts = std::size_t{1} << 18;  // enough to learn from; 7 MB

  // A request whose blocks were touched by nobody since.
  struct Group {
    double touched = 0.0;
    std::uint32_t turn = 1;
    Position known = 0;   // tokens that were known before it
    Position end = 0;     // its tokens
    Position origin = 0;  // where its conversation's own part begins
    std::uint32_t num_segments = 0;
  };

  struct Segment {
    NodeId node = kNoNode;  // none when all of it has been evicted
    GroupId group = kNone;
    std::uint32_t num_ghosts = 0;  // evicted blocks of it that are remembered
    std::uint32_t touches = 0;
    float weight = 1.0F;  // of one block, in the counts
    ReuseClass reuse_class{0};
    ReuseTraits traits;
    std::uint8_t risk = 0;
    std::uint8_t bucket = 0;
    bool waiting = false;  // in a queue of leaves
  };

  // What was known of a node's blocks before the request that ends now.
  struct Recall {
    Position end = 0;  // of the known part
    std::uint32_t touches = 0;
    GroupId group = kNone;
  };

  void advance();
  void grow_older(SegmentId id);
  void start_timer(SegmentId id);
  Recall recall(NodeId node);
  Recall recall_evicted(NodeId node);
  void count_reuse(const Segment& segment, double blocks);
  Group follow(const Request& request, const Recall& deepest) const;
  double interval(const Group& group, const Recall& deepest) const;
  GroupId add_group(const Group& group);
  void supersede_beside(NodeId next);
  void touch(NodeId node, const Segment& touched);

  SegmentId add_segment(const Segment& segment);
  void note_evicted(SegmentId id, std::uint32_t num_blocks);
  void forget_ghosts(SegmentId id, std::uint32_t count);
  void detach(NodeId node);
  void free_if_unused(SegmentId id);
  std::uint32_t queue_of(const Segment& segment);
  void enqueue(SegmentId id);
  void dequeue(SegmentId id);
  void refit();
  double num_blocks(const Segment& segment) const;

  ReuseRates rates_;
  std::vector<Segment> segments_;
  std::vector<SegmentId> spare_segments_;
  std::vector<Group> groups_;
  std::vector<GroupId> spare_groups_;
  std::vector<SegmentId> segment_of_;  // by node, + 1
  GhostRuns<SegmentId> ghosts_;
  std::vector<std::uint64_t> fingerprints_;  // of the blocks that are looked at
  LinkedLists timers_;  // by age bucket
  std::array<double, AgeBuckets::kCount> due_;  // no later than the first of each list reaches the next bucket
  LinkedLists queues_;  // of nodes, all of them leaves: by strip, then age bucket
  struct Strip {
    ReuseClass reuse_class;
    std::uint8_t risk;
  };
  std::vector<Strip> strips_;          // the pairs of class and risk in use
  std::vector<std::uint16_t> strip_of_;  // by class and risk, + 1
  std::vector<double> index_of_;       // by queue
  std::set<std::pair<double, std::uint32_t>> order_;  // non-empty queues by index
  std::vector<NodeId> path_;
  std::vector<Recall> recalls_;
  double now_ = -std::numeric_limits<double>::infinity();  // when advance() was called last
  std::uint64_t num_requests_ = 0;
  std::uint64_t next_fit_ = 0;
};

}  // namespace caudex
