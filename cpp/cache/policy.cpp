#include "cache/policy.hpp"

#include <stdexcept>

#include "cache/policies/fifo.hpp"
#include "cache/policies/gittins.hpp"
#include "cache/policies/lru.hpp"

namespace caudex {
namespace {

template <typename P>
std::unique_ptr<Policy> make(PolicyContext context) {
  return std::make_unique<P>(context);
}

struct Entry {
  const char* name;
  std::unique_ptr<Policy> (*make)(PolicyContext);
};

// A new policy needs a header in policies/ and a line here.
constexpr Entry kPolicies[] = {
    {"lru", make<LruPolicy>},
    {"fifo", make<FifoPolicy>},
    {"gittins", make<GittinsPolicy>},
};

}  // namespace

std::unique_ptr<Policy> make_policy(const std::string& name, PolicyContext context) {
  std::string known;
  for (const Entry& entry : kPolicies) {
    if (name == entry.name) return entry.make(context);
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw std::invalid_argument("unknown policy '" + name + "': choose one of " + known);
}

std::vector<std::string> policy_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kPolicies) names.emplace_back(entry.name);
  return names;
}

}  // namespace caudex
