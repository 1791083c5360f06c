#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace caudex::routing {

/// What the fleet knows of its workers: one row a worker, one column each.
struct WorkerColumns {
  const bool* eligible;
  const double* queued_tokens;
  const double* running;
  const double* foreign_requests;
  const double* recent_tokens;    // uncached, fading
  const double* recent_requests;  // fading
  const double* prefill_rate;     // tokens a second
  const double* capacity_tokens;
  const double* cached_tokens;    // of this request
  const double* used_tokens;      // in all
  const double* busy_tokens;      // of those, read by the requests that are there now, each counted once
  const double* shared_tokens;    // of this request with those
  std::size_t num_workers;
};

/// Figures that are the same for all workers.
struct CostTerms {
  double num_tokens;          // of the request
  double mean_prompt_tokens;  // of the traffic
  double recent_seconds;      // time constant of what is recent
  double stay_seconds;        // of a request at its worker, in the mean
  double reuse;               // share of cached tokens that are wanted again
  double decode_tokens;       // work of one running request, in prefill tokens
  double harm_weight;
};

/// Writes the seconds that sending the request to each worker costs; infinity where it is not eligible. O(n).
/// The formula is documented at caudex.routing.cost.CostPolicy.
void cost_seconds(const WorkerColumns& workers, const CostTerms& terms, double* out);

/// Tokens used of the capacity, by worker; null for what is not known and then does not count.
struct Room {
  const double* used;
  const double* capacity;

  double taken(std::size_t i) const { return (used ? used[i] : 0.0) - (capacity ? capacity[i] : 0.0); }
};

/// The worker of the lowest cost, or -1 if no cost is finite. Equal costs: the most room, then chance; `draw` gives a
/// number in [0, 1) and is asked only if costs are equal. O(n).
std::int64_t cheapest(const double* cost, const Room& room, std::size_t num_workers,
                      const std::function<double()>& draw);

}  // namespace caudex::routing
