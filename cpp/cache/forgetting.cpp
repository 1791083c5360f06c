// What is remembered of namespaces and tenants, bounded by the pool: the part of PrefixCache that forgets their names.
//
// Names come from callers, who may send a new one with every request. Whenever there are twice as many as were in use
// the last time, those that nothing depends on any more are forgotten and their ids are free for others. So a name
// costs O(1), no other call pays anything, and there are never more than twice as many as blocks, requests and pins
// can refer to, or kFewNames.
#include <algorithm>

#include "cache/prefix_cache.hpp"

namespace caudex {

// Without a block, a request, a pin and a registered prefix, a namespace is only its name and its counters.
bool PrefixCache::is_idle(const Space& space) const {
  const Node& root = tree_.nodes()[space.root];
  return root.is_leaf() && root.anchors == 0 && space.registered.empty();
}

// What evicted blocks are remembered by is a hash that begins with the namespace's name: neither a new namespace with
// the old id nor the old one under a new id is taken for another.
void PrefixCache::forget_idle_spaces() {
  std::vector<std::uint8_t> to_be_told(spaces_.size(), 0);
  events_.for_each_space([&](SpaceId id) { to_be_told[id] = 1; });
  for (SpaceId id = 0; id < spaces_.size(); ++id) {
    if (spaces_[id].is_open() && !to_be_told[id] && is_idle(spaces_[id])) forget_space(id);
  }
  space_limit_ = std::max(kFewNames, 2 * space_ids_.size());
}

void PrefixCache::forget_space(SpaceId id) {
  spare_spaces_.push_back(id);
  Space& space = spaces_[id];
  forgotten_ += space.stats;
  tree_.remove_root(space.root);
  space_ids_.erase(space.tree_name);
  if (id == unnamed_space_) unnamed_space_ = kNoSpace;
  space = Space{};
}

// A tenant in no block's audience has nothing that it may see and that a new one may not, and counts towards no k: were
// it remembered, it would be treated the same. What it shares in is kept with the blocks, so none of that is forgotten.
void PrefixCache::forget_idle_tenants() {
  std::vector<std::uint8_t> in_use(tenants_.size() + spare_tenants_.size(), 0);
  audiences_.for_each_member([&](Tenant tenant) { in_use[tenant] = 1; });
  for (const Sequence* sequence = running_; sequence != nullptr; sequence = sequence->next) in_use[sequence->tenant] = 1;
  for (auto at = tenants_.begin(); at != tenants_.end();) {
    if (in_use[at->second]) {
      ++at;
      continue;
    }
    spare_tenants_.push_back(at->second);
    at = tenants_.erase(at);
  }
  tenant_limit_ = std::max(kFewNames, 2 * tenants_.size() + audiences_.count());
}

}  // namespace caudex
