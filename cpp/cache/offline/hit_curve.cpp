#include "cache/offline/hit_curve.hpp"

#include <algorithm>
#include <array>

#include "cache/offline/lru_stack.hpp"

namespace caudex::offline {
namespace {

// By the least significant digit first: linear, and most logs need two digits.
void radix_sort(std::vector<std::uint64_t>& keys) {
  constexpr std::uint32_t kBits = 11;
  constexpr std::size_t kDigits = std::size_t{1} << kBits;
  const std::uint64_t most = keys.empty() ? 0 : *std::max_element(keys.begin(), keys.end());
  std::vector<std::uint64_t> sorted(keys.size());
  for (std::uint32_t shift = 0; shift < 64 && most >> shift != 0; shift += kBits) {
    std::array<std::size_t, kDigits + 1> starts{};
    for (std::uint64_t key : keys) ++starts[(key >> shift) % kDigits + 1];
    for (std::size_t digit = 0; digit < kDigits; ++digit) starts[digit + 1] += starts[digit];
    for (std::uint64_t key : keys) sorted[starts[(key >> shift) % kDigits]++] = key;
    keys.swap(sorted);
  }
}

}  // namespace

void DistanceHistogram::fold() {
  radix_sort(turns_);
  std::vector<Step> merged;
  merged.reserve(steps_.size() + turns_.size());
  const auto step = [&](std::int64_t capacity, std::int64_t slope) {
    if (!merged.empty() && merged.back().capacity == capacity) merged.back().slope += slope;
    else merged.push_back({capacity, slope});
  };
  std::size_t known = 0;
  for (std::uint64_t turn : turns_) {
    const auto capacity = static_cast<std::int64_t>(turn >> 1);
    for (; known < steps_.size() && steps_[known].capacity <= capacity; ++known) step(steps_[known].capacity, steps_[known].slope);
    step(capacity, turn & 1 ? -1 : 1);
  }
  merged.insert(merged.end(), steps_.begin() + static_cast<std::ptrdiff_t>(known), steps_.end());
  steps_.swap(merged);
  turns_.clear();
  fold_at_ = std::max(fold_at_, 2 * steps_.size());
}

Knots DistanceHistogram::knots() {
  fold();
  Knots knots{{0}, {0}};
  std::int64_t slope = 0;
  for (const Step& step : steps_) {
    if (step.slope == 0) continue;
    const std::int64_t hits = knots.hits.back() + slope * (step.capacity - knots.capacities.back());
    slope += step.slope;
    if (step.capacity == 0) continue;
    knots.capacities.push_back(step.capacity);
    knots.hits.push_back(hits);
  }
  return knots;
}

std::vector<Knots> hit_curves(const BlockPaths& log, const std::int64_t* reusable, const std::int32_t* groups,
                              std::size_t num_groups) {
  LruStack stack(log.tree, log.num_requests());
  std::vector<DistanceHistogram> histograms(num_groups);
  std::vector<Stretch> path;
  for (std::uint32_t i = 0; i < log.num_requests(); ++i) {
    DistanceHistogram& histogram = histograms[groups == nullptr ? 0 : static_cast<std::size_t>(groups[i])];
    log.tree.stretches(log.paths[i], path);
    stack.touch(path, [&](std::int64_t distance, std::int64_t depth, std::int64_t length) {
      if (depth < reusable[i]) histogram.add(distance, std::min(length, reusable[i] - depth));
    });
  }
  std::vector<Knots> knots;
  for (DistanceHistogram& histogram : histograms) knots.push_back(histogram.knots());
  return knots;
}

}  // namespace caudex::offline
