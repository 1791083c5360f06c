#include "routing/cost.hpp"

#include <algorithm>
#include <limits>
#include <vector>

namespace caudex::routing {
namespace {

/// A queue in front of a worker busier than this is taken to end still.
constexpr double kMaxUtilisation = 0.95;

/// The wait for room: for the share of the memory that the request takes there, as long as a request stays, and the
/// longer the fuller it is with what cannot be evicted.
double room_seconds(const WorkerColumns& workers, const CostTerms& terms, std::size_t i) {
  const double taken = std::max(0.0, terms.num_tokens - workers.shared_tokens[i]) / workers.capacity_tokens[i];
  const double full = std::min(workers.busy_tokens[i] / workers.capacity_tokens[i] + taken / 2.0, kMaxUtilisation);
  return terms.stay_seconds * taken * full / (1.0 - full);
}

/// What arrived of late at the mean of the workers that may be chosen.
struct Traffic {
  double arrivals = 0.0;          // requests that come to a worker in each second of work at hand, before it has none
  double seconds_a_request = 0.0; // of work
};

double busy(const WorkerColumns& workers, const CostTerms& terms, std::size_t i) {
  return workers.recent_tokens[i] / workers.prefill_rate[i] / terms.recent_seconds;
}

Traffic traffic(const WorkerColumns& workers, const CostTerms& terms) {
  double requests = 0.0, utilisation = 0.0, num_eligible = 0.0;
  for (std::size_t i = 0; i < workers.num_workers; ++i) {
    if (!workers.eligible[i]) continue;
    ++num_eligible;
    requests += workers.recent_requests[i] / terms.recent_seconds;
    utilisation += busy(workers, terms, i);
  }
  if (requests <= 0.0) return {};
  return {requests / num_eligible / (1.0 - std::min(utilisation / num_eligible, kMaxUtilisation)),
          utilisation / requests};
}

double seconds(const WorkerColumns& workers, const CostTerms& terms, std::size_t i, const Traffic& traffic) {
  const double rate = workers.prefill_rate[i];
  const double uncached = terms.num_tokens - workers.cached_tokens[i];
  const double evicted =
      std::max(0.0, std::min(workers.used_tokens[i] + uncached - workers.capacity_tokens[i], uncached));
  const double at_hand = workers.queued_tokens[i] + workers.running[i] * terms.decode_tokens +
                         workers.foreign_requests[i] * terms.mean_prompt_tokens;
  const double utilisation = std::min(busy(workers, terms, i), kMaxUtilisation);
  const double wait = at_hand / rate + room_seconds(workers, terms, i);
  const double work = (uncached + terms.reuse * evicted) / rate;
  const double delayed = traffic.arrivals * (wait + work / 2.0);
  const double later = terms.reuse * utilisation / (1.0 - utilisation) * traffic.seconds_a_request;
  return wait + work * (1.0 + delayed) + later + uncached / rate * terms.harm_weight * workers.running[i];
}

}  // namespace

void cost_seconds(const WorkerColumns& workers, const CostTerms& terms, double* out) {
  const Traffic recent = traffic(workers, terms);
  for (std::size_t i = 0; i < workers.num_workers; ++i) {
    out[i] = workers.eligible[i] ? seconds(workers, terms, i, recent) : std::numeric_limits<double>::infinity();
  }
}

std::int64_t cheapest(const double* cost, const Room& room, std::size_t num_workers,
                      const std::function<double()>& draw) {
  const double* lowest = std::min_element(cost, cost + num_workers);
  if (num_workers == 0 || *lowest == std::numeric_limits<double>::infinity()) return -1;
  if (std::count(cost, cost + num_workers, *lowest) == 1) return lowest - cost;
  double least_taken = std::numeric_limits<double>::infinity();
  std::vector<std::int64_t> equal;
  for (std::size_t i = 0; i < num_workers; ++i) {
    if (cost[i] != *lowest) continue;
    const double mine = room.taken(i);
    if (mine < least_taken) equal.clear();
    least_taken = std::min(least_taken, mine);
    if (mine == least_taken) equal.push_back(static_cast<std::int64_t>(i));
  }
  return equal[static_cast<std::size_t>(draw() * static_cast<double>(equal.size()))];
}

}  // namespace caudex::routing
