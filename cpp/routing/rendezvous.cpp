#include "routing/rendezvous.hpp"

#include <limits>

namespace caudex::routing {
namespace {

/// The finaliser of SplitMix64: every input bit flips every output bit with chance one half.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

double bound(const bool* eligible, const double* load, std::size_t num_workers, double num_tokens, double load_factor) {
  double total = num_tokens, num_eligible = 0.0;
  for (std::size_t i = 0; i < num_workers; ++i) {
    if (!eligible[i]) continue;
    total += load[i];
    ++num_eligible;
  }
  return load_factor * total / num_eligible;
}

}  // namespace

bool rendezvous(const bool* eligible, const Key* workers, const double* load, std::size_t num_workers, Key key,
                double num_tokens, double load_factor, double* cost) {
  const double limit = bound(eligible, load, num_workers, num_tokens, load_factor);
  double least = 2.0;
  bool is_loaded = false;
  for (std::size_t i = 0; i < num_workers; ++i) {
    if (!eligible[i]) {
      cost[i] = std::numeric_limits<double>::infinity();
      continue;
    }
    cost[i] = 1.0 - static_cast<double>(mix(workers[i] ^ key)) / 18446744073709551616.0;
    if (cost[i] < least) {
      least = cost[i];
      is_loaded = load[i] > limit;
    }
    if (load[i] > limit) cost[i] += 1.0;
  }
  return is_loaded;
}

}  // namespace caudex::routing
