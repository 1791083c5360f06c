#include "cache/policy.hpp"

#include <cmath>
#include <limits>
#include <stdexcept>

#include "cache/policies/arc.hpp"
#include "cache/policies/fifo.hpp"
#include "cache/policies/gdsf.hpp"
#include "cache/policies/gittins.hpp"
#include "cache/policies/lfu.hpp"
#include "cache/policies/lru.hpp"
#include "cache/policies/priority.hpp"
#include "cache/policies/s3fifo.hpp"
#include "cache/policies/slru.hpp"
#include "cache/policies/tlru.hpp"
#include "cache/policies/ttl.hpp"

namespace caudex {
namespace {

template <typename P>
std::unique_ptr<Policy> make(const PolicyContext& context, double) {
  return std::make_unique<P>(context);
}

template <typename P>
std::unique_ptr<Policy> make_with(const PolicyContext& context, double parameter) {
  return std::make_unique<P>(context, parameter);
}

struct Entry {
  const char* name;
  std::unique_ptr<Policy> (*make)(const PolicyContext&, double);
  double parameter;  // its default; NaN for a policy that takes none
};

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// A new policy needs a header in policies/ and a line here.
constexpr Entry kPolicies[] = {
    {"lru", make<LruPolicy>, kNone},
    {"fifo", make<FifoPolicy>, kNone},
    {"lfu", make<LfuPolicy>, kNone},
    {"slru", make<SlruPolicy>, kNone},
    {"s3fifo", make<S3FifoPolicy>, kNone},
    {"arc", make<ArcPolicy>, kNone},
    {"tlru", make_with<TlruPolicy>, 2048.0},   // tokens that may be computed again
    {"gdsf", make_with<GdsfPolicy>, 30000.0},  // tokens of depth at which attention costs as much as the rest
    {"ttl", make_with<TtlPolicy>, 0.0},        // seconds
    {"priority", make<PriorityPolicy>, kNone},
    {"gittins", make<GittinsPolicy>, kNone},
};

double parse_parameter(const std::string& name, const std::string& text) {
  std::size_t used = 0;
  double value = 0.0;
  try {
    value = std::stod(text, &used);
  } catch (const std::logic_error&) {
    used = 0;
  }
  if (used == 0 || used != text.size() || !std::isfinite(value) || value < 0.0) {
    throw std::invalid_argument("the parameter of policy '" + name + "' must be a number of at least 0, got '" + text +
                                "'");
  }
  return value;
}

std::unique_ptr<Policy> make_builtin(const Entry& entry, const std::string& parameter, const PolicyContext& context) {
  if (parameter.empty()) return entry.make(context, entry.parameter);
  if (std::isnan(entry.parameter)) {
    throw std::invalid_argument(std::string("policy '") + entry.name + "' takes no parameter, got '" + parameter + "'");
  }
  return entry.make(context, parse_parameter(entry.name, parameter));
}

}  // namespace

std::unique_ptr<Policy> make_policy(const std::string& text, const PolicyContext& context) {
  const std::size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  const std::string parameter = colon == std::string::npos ? std::string() : text.substr(colon + 1);
  for (const Entry& entry : kPolicies) {
    if (name == entry.name) return make_builtin(entry, parameter, context);
  }
  std::string known;
  for (const std::string& other : policy_names()) known += (known.empty() ? "" : ", ") + other;
  throw std::invalid_argument("unknown policy '" + text + "': choose one of " + known);
}

std::vector<std::string> policy_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kPolicies) names.emplace_back(entry.name);
  return names;
}

}  // namespace caudex
