#include "cache/policies/gittins.hpp"

#include <algorithm>
#include <cmath>

namespace caudex {
namespace {

constexpr std::size_t kSetNodeBytes = 48;

// Puts it in a spare place, or in a new one. Most of the places hold what is known of evicted blocks, up to a bound that
// is soon reached: so they grow by a quarter at a time.
template <typename T>
std::uint32_t add(std::vector<T>& items, std::vector<std::uint32_t>& spare, const T& item) {
  if (!spare.empty()) {
    const std::uint32_t place = spare.back();
    spare.pop_back();
    items[place] = item;
    return place;
  }
  if (items.size() == items.capacity()) items.reserve(items.size() + items.size() / 4 + 16);
  items.push_back(item);
  return static_cast<std::uint32_t>(items.size() - 1);
}

}  // namespace

GittinsPolicy::GittinsPolicy(const PolicyContext& context)
    : Policy(context),
      ghosts_(std::min(kGhostsPerBlock * context.pool.num_blocks(), kMostGhosts)),
      strip_of_(ReuseClass::kCount * ReuseRates::kRiskLevels) {
  due_.fill(kNever);
}

// ------------------------------------------------------------------------------------------------- a request ends

void GittinsPolicy::end_request(const Request& request) {
  advance();
  if (++num_requests_ >= next_fit_) refit();

  path_.clear();
  for (NodeId id = request.leaf; !nodes[id].is_root(); id = nodes[id].parent) path_.push_back(id);
  std::reverse(path_.begin(), path_.end());
  recalls_.clear();
  Recall deepest;
  std::size_t num_known = 0;  // nodes of the path that were known as a whole
  for (NodeId node : path_) {
    recalls_.push_back(recall(node));
    if (recalls_.back().end == 0) continue;
    deepest = recalls_.back();
    num_known += deepest.end == nodes[node].end;
  }

  const Group followed = follow(request, deepest);
  if (num_known > 0 && num_known < path_.size() && deepest.end == nodes[path_[num_known - 1]].end) {
    supersede_beside(path_[num_known]);
  }
  Segment touched;
  touched.traits = ReuseTraits::of(request.num_tokens - std::min(request.num_tokens, deepest.end),
                                   request.num_output_tokens, interval(followed, deepest));
  touched.risk = static_cast<std::uint8_t>(rates_.risk_level(touched.traits));
  touched.group = add_group(followed);
  ++groups_[touched.group].num_segments;  // keeps it while segments move
  for (std::size_t i = 0; i < path_.size(); ++i) {
    touched.touches = recalls_[i].touches + 1;
    touched.reuse_class = ReuseClass::of(touched.touches, followed.turn);
    if (nodes[path_[i]].start >= followed.origin) {
      if (request.hints.ends) touched.reuse_class = ReuseClass::ended();
      else if (request.hints.expected_return >= 0.0) {
        touched.reuse_class = ReuseClass::returning_in(request.hints.expected_return);
      }
    }
    touch(path_[i], touched);
  }
  if (--groups_[touched.group].num_segments == 0) spare_groups_.push_back(touched.group);
}

// What is known of a node, counted as reuse.
GittinsPolicy::Recall GittinsPolicy::recall(NodeId node) {
  const SegmentId id = slot(segment_of_, node);
  if (id == 0) return recall_evicted(node);
  const Segment& segment = segments_[id - 1];
  count_reuse(segment, nodes[node].blocks.size());
  return {nodes[node].end, segment.touches, segment.group};
}

// The node is new, but some of its blocks may have been there before.
GittinsPolicy::Recall GittinsPolicy::recall_evicted(NodeId id) {
  Recall recall;
  const Node& node = nodes[id];
  const Position size = pool.block_size();
  const std::uint32_t first = node.start / size;
  const std::uint32_t num_full = std::min(node.blocks.size(), node.end / size - first);
  fingerprints_.clear();
  for (std::uint32_t i = 0; i < num_full; ++i) fingerprints_.push_back(pool.fingerprint(node.blocks[i]));
  for (std::uint32_t known = 0; known < num_full;) {
    const auto ghosts = ghosts_.take(fingerprints_.data() + known, num_full - known);
    if (ghosts.count == 0) break;
    const Segment& segment = segments_[ghosts.value];
    // Block by block, so that a sum does not depend on how they were evicted.
    for (std::uint32_t i = 0; i < ghosts.count; ++i) count_reuse(segment, 1.0);
    known += ghosts.count;
    recall = {(first + known) * size, segment.touches, segment.group};
    forget_ghosts(ghosts.value, ghosts.count);
  }
  return recall;
}

void GittinsPolicy::count_reuse(const Segment& segment, double blocks) {
  const double seconds = now_ - groups_[segment.group].touched - AgeBuckets::begin(segment.bucket);
  rates_.count_reuse(segment.reuse_class, segment.traits, segment.bucket, blocks * segment.weight, std::max(seconds, 0.0));
}

// Whether the request goes on with the conversation that touched its deepest known block: if it covers at least half
// of what that one added, or all but its last block.
GittinsPolicy::Group GittinsPolicy::follow(const Request& request, const Recall& deepest) const {
  Group group;
  group.touched = now_;
  group.known = group.origin = deepest.end;
  group.end = request.num_tokens;
  if (deepest.group == kNone) return group;
  const Group& parent = groups_[deepest.group];
  const bool covers_half = deepest.end > parent.known && 2 * (deepest.end - parent.known) >= parent.end - parent.known;
  if (covers_half || deepest.end + pool.block_size() >= parent.end) {
    group.turn = parent.turn + 1;
    group.origin = parent.origin;
  }
  return group;
}

// Since the conversation's touch before; negative at its first turn.
double GittinsPolicy::interval(const Group& group, const Recall& deepest) const {
  return group.turn > 1 ? now_ - groups_[deepest.group].touched : -1.0;
}

// The request went to `next` where there was one way before: what lies that way will hardly be wanted again.
void GittinsPolicy::supersede_beside(NodeId next) {
  const NodeId first = nodes[nodes[next].parent].first_child;
  NodeId left = first == next ? nodes[next].next_sibling : first;
  if (left == kNoNode) return;
  const NodeId last = nodes[left].next_sibling == next ? nodes[next].next_sibling : nodes[left].next_sibling;
  if (last != kNoNode || slot(segment_of_, left) == 0) return;
  const GroupId group = segments_[segment_of_[left] - 1].group;
  for (; left != kNoNode; left = nodes[left].first_child) {
    const SegmentId id = slot(segment_of_, left);
    if (id == 0 || segments_[id - 1].group != group) return;
    const bool waiting = segments_[id - 1].waiting;
    if (waiting) dequeue(id - 1);
    segments_[id - 1].reuse_class = ReuseClass::superseded();
    if (waiting) enqueue(id - 1);
    if (nodes[left].first_child != kNoNode && nodes[nodes[left].first_child].next_sibling != kNoNode) return;
  }
}

void GittinsPolicy::touch(NodeId node, const Segment& touched) {
  detach(node);
  const SegmentId id = add_segment(touched);
  Segment& segment = segments_[id];
  segment.node = node;
  segment.weight = 1.0F / std::sqrt(std::max(static_cast<float>(nodes[node].blocks.size()), 1.0F));
  start_timer(id);
  segment_of_[node] = id + 1;
}

// -------------------------------------------------------------------------------------------------- candidates

void GittinsPolicy::offer(NodeId node) {
  const SegmentId id = slot(segment_of_, node);
  if (id != 0 && nodes[node].is_leaf() && !segments_[id - 1].waiting) enqueue(id - 1);
}

void GittinsPolicy::withdraw(NodeId node) {
  const SegmentId id = slot(segment_of_, node);
  if (id == 0) return;
  if (segments_[id - 1].waiting) dequeue(id - 1);
  if (!nodes[node].is_pinned()) detach(node);
}

void GittinsPolicy::split(NodeId upper, NodeId lower) {
  slot(segment_of_, std::max(upper, lower));
  const SegmentId below = segment_of_[lower];
  if (below == 0) return;
  Segment segment = segments_[below - 1];
  segment.node = upper;
  segment.num_ghosts = 0;
  segment.waiting = false;
  const SegmentId above = add_segment(segment);
  timers_.insert_after(segments_[above].bucket, below - 1, above);
  segment_of_[upper] = above + 1;
}

bool GittinsPolicy::merge(NodeId upper, NodeId lower) {
  const SegmentId above = slot(segment_of_, upper), below = slot(segment_of_, lower);
  if (above == 0 || below == 0) return false;
  const Segment& a = segments_[above - 1];
  const Segment& b = segments_[below - 1];
  if (a.group != b.group || !(a.reuse_class == b.reuse_class) || a.touches != b.touches || a.num_ghosts > 0) return false;
  detach(upper);
  return true;
}

Victim GittinsPolicy::victim(std::uint32_t wanted) {
  advance();
  const Victim victim = whole(queues_.front(order_.begin()->second), wanted);
  note_evicted(segment_of_[victim.node] - 1, victim.num_blocks);
  return victim;
}

// The last blocks of a segment's node will go.
void GittinsPolicy::note_evicted(SegmentId id, std::uint32_t num_blocks) {
  const Node& node = nodes[segments_[id].node];
  const std::uint32_t num_full = node.end / pool.block_size() - node.start / pool.block_size();
  fingerprints_.clear();
  for (std::uint32_t i = node.blocks.size(); i > node.blocks.size() - num_blocks; --i) {
    if (i <= num_full) fingerprints_.push_back(pool.fingerprint(node.blocks[i - 1]));
  }
  const auto count = static_cast<std::uint32_t>(fingerprints_.size());
  const auto forget = [&](SegmentId forgotten, std::uint32_t number) { forget_ghosts(forgotten, number); };
  segments_[id].num_ghosts += count;
  const SegmentId* newest = ghosts_.newest();
  if (newest != nullptr && *newest == id) ghosts_.extend(fingerprints_.data(), count, forget);
  else ghosts_.add(fingerprints_.data(), count, id, forget);
}

// --------------------------------------------------------------------------------------------------------- time

// Moves segments to the age bucket they have reached.
void GittinsPolicy::advance() {
  if (now <= now_) return;
  now_ = now;
  for (int bucket = 0; bucket + 1 < AgeBuckets::kCount; ++bucket) {
    while (due_[bucket] <= now_) {
      const SegmentId id = timers_.front(bucket);
      due_[bucket] = id == kNone ? kNever : groups_[segments_[id].group].touched + AgeBuckets::begin(bucket + 1);
      if (due_[bucket] <= now_) grow_older(id);
    }
  }
}

void GittinsPolicy::grow_older(SegmentId id) {
  Segment& segment = segments_[id];
  const int bucket = segment.bucket;
  rates_.count_exposure(segment.reuse_class, segment.traits, bucket,
                        num_blocks(segment) * segment.weight * AgeBuckets::width(bucket));
  const bool waiting = segment.waiting;
  if (waiting) dequeue(id);
  timers_.remove(bucket, id);
  segment.bucket = static_cast<std::uint8_t>(bucket + 1);
  start_timer(id);
  if (waiting) enqueue(id);
}

// Puts a segment in the list of its bucket, whose others were all touched before it.
void GittinsPolicy::start_timer(SegmentId id) {
  const int bucket = segments_[id].bucket;
  if (timers_.empty(bucket)) due_[bucket] = groups_[segments_[id].group].touched + AgeBuckets::begin(bucket + 1);
  timers_.push_back(bucket, id);
}

void GittinsPolicy::refit() {
  next_fit_ = num_requests_ + std::clamp<std::uint64_t>(num_requests_ / 16, 4, kRequestsBetweenFits);
  rates_.fit();
  std::set<std::pair<double, std::uint32_t>> order;
  for (const auto& entry : order_) {
    const Strip& strip = strips_[entry.second / AgeBuckets::kCount];
    const double index = rates_.index(strip.reuse_class, strip.risk, static_cast<int>(entry.second % AgeBuckets::kCount));
    index_of_[entry.second] = index;
    order.emplace(index, entry.second);
  }
  order_.swap(order);
}

// ------------------------------------------------------------------------------------------------------- queues

std::uint32_t GittinsPolicy::queue_of(const Segment& segment) {
  std::uint16_t& strip = strip_of_[segment.reuse_class.id * ReuseRates::kRiskLevels + segment.risk];
  if (strip == 0) {
    strips_.push_back({segment.reuse_class, segment.risk});
    strip = static_cast<std::uint16_t>(strips_.size());
    index_of_.resize(strips_.size() * AgeBuckets::kCount);
  }
  return (strip - 1) * AgeBuckets::kCount + segment.bucket;
}

void GittinsPolicy::enqueue(SegmentId id) {
  Segment& segment = segments_[id];
  segment.waiting = true;
  const std::uint32_t queue = queue_of(segment);
  if (queues_.empty(queue)) {
    index_of_[queue] = rates_.index(segment.reuse_class, segment.risk, segment.bucket);
    order_.emplace(index_of_[queue], queue);
  }
  queues_.push_back(queue, segment.node);
}

void GittinsPolicy::dequeue(SegmentId id) {
  segments_[id].waiting = false;
  const std::uint32_t queue = queue_of(segments_[id]);
  queues_.remove(queue, segments_[id].node);
  if (queues_.empty(queue)) order_.erase({index_of_[queue], queue});
}

// ----------------------------------------------------------------------------------------------- segments' lives

GittinsPolicy::SegmentId GittinsPolicy::add_segment(const Segment& segment) {
  ++groups_[segment.group].num_segments;
  return add(segments_, spare_segments_, segment);
}

GittinsPolicy::GroupId GittinsPolicy::add_group(const Group& group) { return add(groups_, spare_groups_, group); }

void GittinsPolicy::forget_ghosts(SegmentId id, std::uint32_t count) {
  segments_[id].num_ghosts -= count;
  free_if_unused(id);
}

// The node is another's now, or gone; its evicted blocks keep the segment.
void GittinsPolicy::detach(NodeId node) {
  const SegmentId id = slot(segment_of_, node);
  if (id == 0) return;
  segment_of_[node] = 0;
  if (segments_[id - 1].waiting) dequeue(id - 1);
  segments_[id - 1].node = kNoNode;
  free_if_unused(id - 1);
}

void GittinsPolicy::free_if_unused(SegmentId id) {
  const Segment& segment = segments_[id];
  if (segment.node != kNoNode || segment.num_ghosts > 0) return;
  timers_.remove(segment.bucket, id);
  if (--groups_[segment.group].num_segments == 0) spare_groups_.push_back(segment.group);
  spare_segments_.push_back(id);
}

double GittinsPolicy::num_blocks(const Segment& segment) const {
  return segment.num_ghosts + (segment.node == kNoNode ? 0.0 : nodes[segment.node].blocks.size());
}

std::size_t GittinsPolicy::bytes() const {
  return rates_.bytes() + segments_.capacity() * sizeof(Segment) + groups_.capacity() * sizeof(Group) +
         (spare_segments_.capacity() + spare_groups_.capacity() + segment_of_.capacity()) * sizeof(SegmentId) +
         ghosts_.bytes() + timers_.bytes() + queues_.bytes() + strips_.capacity() * sizeof(Strip) +
         strip_of_.size() * sizeof(strip_of_[0]) + index_of_.capacity() * sizeof(double) + order_.size() * kSetNodeBytes;
}

}  // namespace caudex
