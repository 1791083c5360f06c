#include "cache/offline/clairvoyant.hpp"

#include <algorithm>
#include <queue>

#include "cache/offline/last_touches.hpp"

namespace caudex::offline {

NextUses::NextUses(const BlockPaths& log, const std::int64_t* reusable)
    : first_(log.num_requests()), last_(log.num_requests()), reusable_(reusable, reusable + log.num_requests()) {
  LastTouches touches(log.tree);  // over the reversed log, so an owner is the next request that wants its blocks
  std::vector<Stretch> path;
  for (std::uint32_t i = log.num_requests(); i-- > 0;) {
    const auto wanted = static_cast<std::uint32_t>(reusable_[i]);
    first_[i] = groups_.size();
    const auto append = [&](std::uint32_t next_use, std::uint32_t length) {
      if (length == 0) return;
      if (groups_.size() > first_[i] && groups_.back().next_use == next_use) groups_.back().length += length;
      else groups_.push_back({length, next_use});
    };
    std::uint32_t depth = 0;
    log.tree.stretches(log.tree.cut(log.paths[i], wanted), path);
    for (const Stretch& stretch : path) {
      touches.touch(stretch, i, [&](std::uint32_t owner, std::uint32_t at, std::uint32_t length) {
        append(owner, length);
        depth = at + length;
      });
    }
    append(kNever, wanted - depth);
    if (wanted < log.paths[i].length) {  // the last block, full to its end, is kept but of no use to this request
      const Path path = log.paths[i];
      const PathTree::Branch& branch = log.tree[path.branch];
      groups_.push_back({1, touches.owner_of(branch.begin + (path.length - 1 - branch.depth), kNever)});
    }
    last_[i] = groups_.size();
  }
}

namespace {

// The cached blocks, by the request that wants them next.
class Residents {
 public:
  explicit Residents(std::int64_t num_requests) : wanted_(num_requests) {}

  std::int64_t size() const { return size_; }

  // Takes out the blocks that `request` itself wants and returns how many there are.
  std::int64_t take(std::int64_t request) {
    const std::int64_t count = wanted_[request].size();
    size_ -= count;
    wanted_[request] = {};
    return count;
  }

  // Takes out one block at `depth` of the path of a later request, if it is there. A block that nobody wants is left
  // and then counted twice, which changes nothing: such blocks go first, and each stands for one slot that no wanted
  // block gets.
  void take_one(std::int64_t next_use, std::int64_t depth) {
    if (next_use == NextUses::kNever || wanted_[next_use].begin != depth || wanted_[next_use].size() == 0) return;
    ++wanted_[next_use].begin;
    --size_;
  }

  // Puts in blocks from `depth` on of the path of a later request, deeper ones before those nearer the root.
  void put(std::int64_t next_use, std::int64_t depth, std::int64_t count) {
    size_ += count;
    if (next_use == NextUses::kNever) {
      unwanted_ += count;
      return;
    }
    Range& range = wanted_[next_use];
    const bool deeper_ones_follow = range.size() > 0 && range.begin == depth + count;
    if (range.size() == 0) farthest_.push(next_use);
    if (!deeper_ones_follow) size_ -= range.size();
    range = {depth, deeper_ones_follow ? range.end : depth + count};
  }

  void evict(std::int64_t count) {
    size_ -= count;
    const std::int64_t unwanted = std::min(count, unwanted_);
    unwanted_ -= unwanted;
    count -= unwanted;
    while (count > 0) {
      Range& range = wanted_[farthest_.top()];
      const std::int64_t evicted = std::min(count, range.size());
      range.end -= evicted;
      count -= evicted;
      if (range.size() == 0) farthest_.pop();
    }
  }

 private:
  struct Range {  // depths on the wanting request's path
    std::int64_t begin = 0, end = 0;
    std::int64_t size() const { return end - begin; }
  };

  std::vector<Range> wanted_;
  std::priority_queue<std::int64_t> farthest_;  // next uses; those whose range has emptied are dropped when met
  std::int64_t unwanted_ = 0;
  std::int64_t size_ = 0;
};

}  // namespace

std::vector<std::int64_t> clairvoyant_hits(const NextUses& uses, std::int64_t capacity) {
  std::vector<std::int64_t> hits(uses.num_requests());
  Residents residents(uses.num_requests());
  for (std::int64_t i = 0; i < uses.num_requests(); ++i) {
    hits[i] = residents.take(i);
    std::int64_t depth = 0;
    for (const NextUses::Group* group = uses.begin(i); group != uses.end(i); ++group) {
      if (depth >= uses.reusable(i)) residents.take_one(group->next_use, depth);
      depth += group->length;
    }
    const std::int64_t kept = std::min(depth, capacity);
    residents.evict(std::max<std::int64_t>(residents.size() + kept - capacity, 0));
    for (const NextUses::Group* group = uses.end(i); group != uses.begin(i);) {
      --group;
      depth -= group->length;
      if (depth < kept) residents.put(group->next_use, depth, std::min<std::int64_t>(group->length, kept - depth));
    }
  }
  return hits;
}

}  // namespace caudex::offline
