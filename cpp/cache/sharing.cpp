#include "cache/sharing.hpp"

#include <algorithm>

namespace caudex {

bool Audiences::admits(AudienceId id, Tenant tenant) const {
  if (id == kEveryone || tenant == kOperator) return true;
  const std::vector<Tenant>& tenants = sets_[id].tenants;
  return std::binary_search(tenants.begin(), tenants.end(), tenant);
}

AudienceId Audiences::join(AudienceId id, Tenant tenant) {
  if (admits(id, tenant)) {
    hold(id);
    return id;
  }
  std::vector<Tenant> tenants = sets_[id].tenants;
  auto next = tenants.insert(std::upper_bound(tenants.begin(), tenants.end(), tenant), tenant) + 1;
  if (k_ == 0 && tenants.size() > kMostMembers) tenants.erase(next == tenants.end() ? tenants.begin() : next);
  return intern(std::move(tenants));
}

AudienceId Audiences::only(Tenant tenant) { return intern({tenant}); }

AudienceId Audiences::intern(std::vector<Tenant> tenants) {
  if (k_ != 0 && tenants.size() >= k_) return kEveryone;
  auto found = ids_.find(tenants);
  if (found == ids_.end()) {
    AudienceId id = static_cast<AudienceId>(sets_.size());
    if (free_.empty()) {
      sets_.emplace_back();
    } else {
      id = free_.back();
      free_.pop_back();
    }
    sets_[id].tenants = tenants;
    found = ids_.emplace(std::move(tenants), id).first;
  }
  hold(found->second);
  return found->second;
}

void Audiences::hold(AudienceId id) {
  if (id != kEveryone) ++sets_[id].holders;
}

void Audiences::drop(AudienceId id) {
  if (id == kEveryone || --sets_[id].holders > 0) return;
  ids_.erase(sets_[id].tenants);
  sets_[id].tenants.clear();
  free_.push_back(id);
}

}  // namespace caudex
