#include "routing/cost.hpp"

#include <algorithm>
#include <limits>
#include <vector>

namespace caudex::routing {
namespace {

/// The expected queue of a worker busier than this is taken to be finite still.
constexpr double kMaxUtilisation = 0.98;

double cost_tokens(const WorkerColumns& workers, const CostTerms& terms, std::size_t i) {
  const double uncached = terms.num_tokens - workers.cached_tokens[i];
  const double at_hand = workers.queued_tokens[i] + workers.running[i] * terms.decode_tokens +
                         workers.foreign_requests[i] * terms.mean_prompt_tokens;
  const double utilisation =
      std::min(workers.recent_tokens[i] / (workers.prefill_rate[i] * terms.recent_seconds), kMaxUtilisation);
  const double coming = utilisation / (1.0 - utilisation) * terms.mean_prompt_tokens;
  const double evicted =
      std::max(0.0, std::min(workers.used_tokens[i] + uncached - workers.capacity_tokens[i], uncached));
  return at_hand + uncached * (1.0 + terms.harm_weight * workers.running[i]) + terms.coming_weight * coming +
         terms.reuse * evicted;
}

}  // namespace

void cost_seconds(const WorkerColumns& workers, const CostTerms& terms, double* out) {
  for (std::size_t i = 0; i < workers.num_workers; ++i) {
    out[i] = workers.eligible[i] ? cost_tokens(workers, terms, i) / workers.prefill_rate[i]
                                 : std::numeric_limits<double>::infinity();
  }
}

std::int64_t cheapest(const double* cost, const double* used, std::size_t num_workers,
                      const std::function<double()>& draw) {
  const double* lowest = std::min_element(cost, cost + num_workers);
  if (num_workers == 0 || *lowest == std::numeric_limits<double>::infinity()) return -1;
  if (std::count(cost, cost + num_workers, *lowest) == 1) return lowest - cost;
  double least_used = std::numeric_limits<double>::infinity();
  std::vector<std::int64_t> equal;
  for (std::size_t i = 0; i < num_workers; ++i) {
    if (cost[i] != *lowest) continue;
    const double mine = used ? used[i] : 0.0;
    if (mine < least_used) equal.clear();
    least_used = std::min(least_used, mine);
    if (mine == least_used) equal.push_back(static_cast<std::int64_t>(i));
  }
  return equal[static_cast<std::size_t>(draw() * static_cast<double>(equal.size()))];
}

}  // namespace caudex::routing
