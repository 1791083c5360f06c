#include "routing/cost.hpp"

#include <algorithm>
#include <limits>

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

}  // namespace caudex::routing
