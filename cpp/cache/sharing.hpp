// Who may see a cached block: sharing between tenants.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache/types.hpp"

namespace caudex {

// What a tenant can learn from the time its requests take, under each policy:
//   kIsolated   nothing about another tenant: each has a tree of its own.
//   kShared     for any prefix it can guess: whether somebody in the namespace has sent it lately.
//   kPublic     that only of prefixes which the operator has registered; beyond, nothing.
//   kAnonymous  for any prefix it can guess: whether k different tenants have each computed it themselves since it was
//               last evicted. Never whether one particular tenant has, with k > 1 and honest other tenants.
enum class Sharing { kIsolated, kShared, kPublic, kAnonymous };

using Tenant = std::uint32_t;
using AudienceId = std::uint32_t;
inline constexpr AudienceId kEveryone = 0;
inline constexpr Tenant kOperator = UINT32_MAX;  // sees everything; for what is not a look-up

// Sets of tenants, each kept once and counted by the nodes that carry it. A node's audience are the tenants who have
// computed its tokens themselves, or everyone.
//
// Callers may name tenants without end, so a set without a limit of its own has at most kMostMembers: when one more joins,
// another is left out, and has to compute the tokens again to see them. Costs: O(members) to join, O(log members) to ask.
class Audiences {
 public:
  static constexpr std::size_t kMostMembers = 256;

  // A set of `k` tenants is everyone; 0 for no such limit.
  explicit Audiences(std::uint32_t k) : k_(k), sets_(1) {}

  bool admits(AudienceId id, Tenant tenant) const;
  // The same audience with one more tenant, held once more.
  AudienceId join(AudienceId id, Tenant tenant);
  AudienceId only(Tenant tenant);
  void hold(AudienceId id);
  void drop(AudienceId id);
  const std::vector<Tenant>& members(AudienceId id) const { return sets_[id].tenants; }
  std::size_t count() const { return ids_.size(); }
  template <typename Visit>
  void for_each_member(Visit visit) const {
    for (const Set& set : sets_) std::for_each(set.tenants.begin(), set.tenants.end(), visit);
  }

 private:
  struct Set {
    std::vector<Tenant> tenants;  // sorted
    std::uint32_t holders = 0;
  };
  AudienceId intern(std::vector<Tenant> tenants);

  std::uint32_t k_;
  std::vector<Set> sets_;
  std::vector<AudienceId> free_;
  std::map<std::vector<Tenant>, AudienceId> ids_;
};

}  // namespace caudex
