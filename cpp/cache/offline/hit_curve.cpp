#include "cache/offline/hit_curve.hpp"

#include <algorithm>

namespace caudex::offline {

void DistanceHistogram::fold() {
  std::sort(steps_.begin(), steps_.end(), [](const Step& a, const Step& b) { return a.capacity < b.capacity; });
  std::size_t kept = 0;
  for (std::size_t i = 0; i < steps_.size();) {
    Step merged{steps_[i].capacity, 0};
    for (; i < steps_.size() && steps_[i].capacity == merged.capacity; ++i) merged.slope += steps_[i].slope;
    if (merged.slope != 0) steps_[kept++] = merged;
  }
  steps_.resize(kept);
  fold_at_ = std::max(fold_at_, 2 * kept);
}

Knots DistanceHistogram::knots() {
  fold();
  Knots knots{{0}, {0}};
  std::int64_t slope = 0;
  for (const Step& step : steps_) {
    const std::int64_t hits = knots.hits.back() + slope * (step.capacity - knots.capacities.back());
    slope += step.slope;
    if (step.capacity == 0) continue;
    knots.capacities.push_back(step.capacity);
    knots.hits.push_back(hits);
  }
  return knots;
}

void HitCurve::add(const BlockTrace& trace, const std::int32_t* groups) {
  for (std::int64_t i = 0; i < trace.num_requests; ++i) {
    DistanceHistogram& histogram = groups_[groups == nullptr ? 0 : groups[i]];
    const auto reusable = static_cast<std::size_t>(trace.reusable(i));
    stack_.touch(trace.path(i), static_cast<std::size_t>(trace.full(i)),
                 [&](std::int64_t distance, std::size_t depth, std::size_t length) {
                   if (depth >= reusable) return;
                   histogram.add(distance, static_cast<std::int64_t>(std::min(length, reusable - depth)));
                 });
  }
}

}  // namespace caudex::offline
