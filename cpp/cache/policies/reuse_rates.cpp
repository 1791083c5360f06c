#include "cache/policies/reuse_rates.hpp"

#include <algorithm>
#include <cmath>

namespace caudex {
namespace {

constexpr int kAges = AgeBuckets::kCount;
constexpr double kShrinkage = 4.0;
constexpr double kTraitPower = 0.7;
constexpr double kLevelsPerOctave = 2.0;
constexpr int kNeutralLevel = ReuseRates::kRiskLevels / 2;
constexpr int kFirstTouchBin = 3;
constexpr int kFirstTurnBin = kFirstTouchBin + ReuseClass::kTouchBins;
constexpr int kFirstReturn = kFirstTurnBin + ReuseClass::kTouchBins * ReuseClass::kTurnBins;

int log2_bin(std::uint32_t value, int bins) {
  int bin = 0;
  while (value > 1 && bin + 1 < bins) {
    value >>= 1;
    ++bin;
  }
  return bin;
}

// 0 for less than 1, then one bin for each two octaves.
std::uint8_t log4_bin(double value) {
  if (!(value >= 1.0)) return 0;
  return static_cast<std::uint8_t>(std::min(1 + std::ilogb(value) / 2, ReuseTraits::kBins - 1));
}

const std::array<double, kAges + 1>& begins() {
  static const auto table = [] {
    std::array<double, kAges + 1> begins{};
    for (int b = 1; b <= kAges; ++b) begins[b] = 0.5 * std::exp2((b - 1) / 3.0);
    return begins;
  }();
  return table;
}

}  // namespace

double AgeBuckets::begin(int bucket) { return begins()[bucket]; }

ReuseClass ReuseClass::of(std::uint32_t touches, std::uint32_t turn) {
  return ReuseClass(kFirstTurnBin + log2_bin(touches, kTouchBins) * kTurnBins + log2_bin(turn, kTurnBins));
}

ReuseClass ReuseClass::returning_in(double seconds) {
  const auto& table = begins();
  const auto next = std::upper_bound(table.begin() + 1, table.end() - 1, seconds);
  return ReuseClass(kFirstReturn + static_cast<int>(next - table.begin()) - 1);
}

ReuseClass ReuseClass::parent() const {
  if (id < kFirstTurnBin || id >= kFirstReturn) return ReuseClass(0);
  return ReuseClass(kFirstTouchBin + (id - kFirstTurnBin) / kTurnBins);
}

ReuseTraits ReuseTraits::of(std::uint64_t new_tokens, std::uint64_t output_tokens, double interval) {
  return {{log4_bin(static_cast<double>(new_tokens)), log4_bin(static_cast<double>(output_tokens)),
           interval < 0.0 ? std::uint8_t{0} : log4_bin(4.0 * interval)}};
}

void ReuseRates::count_reuse(ReuseClass c, const ReuseTraits& traits, int bucket, double blocks, double seconds) {
  for (ReuseClass k = c;; k = k.parent()) {
    counted(k).reuses[bucket] += blocks;
    if (k.id == 0) break;
  }
  for (int t = 0; t < ReuseTraits::kCount; ++t) observed_[t][traits.bins[t]] += blocks;
  count_exposure(c, traits, bucket, blocks * seconds);
}

void ReuseRates::count_exposure(ReuseClass c, const ReuseTraits& traits, int bucket, double block_seconds) {
  for (ReuseClass k = c;; k = k.parent()) {
    counted(k).exposure[bucket] += block_seconds;
    if (k.id == 0) break;
  }
  const double expected = rates(c)[bucket] * block_seconds;
  for (int t = 0; t < ReuseTraits::kCount; ++t) expected_[t][traits.bins[t]] += expected;
}

ReuseRates::Class& ReuseRates::counted(ReuseClass c) {
  std::unique_ptr<Class>& entry = classes_[c.id];
  if (entry == nullptr) entry = std::make_unique<Class>();
  return *entry;
}

ReuseRates::ByAge ReuseRates::prior(ReuseClass c) {
  ByAge prior;
  if (c.id == 0) {
    for (int b = 0; b < kAges; ++b) {
      prior[b] = 0.3 / std::max((AgeBuckets::begin(b) + AgeBuckets::begin(b + 1)) / 2, 0.25);
    }
    return prior;
  }
  prior = rates(c.parent());
  if (c == ReuseClass::ended()) {
    for (double& rate : prior) rate /= 100.0;
  }
  if (c.id >= kFirstReturn) {  // most come within a bucket of the announced time
    const int announced = c.id - kFirstReturn;
    for (int b = 0; b < announced - 1; ++b) prior[b] /= 10.0;
    for (int b = std::max(announced - 1, 0); b <= std::min(announced + 1, kAges - 1); ++b) {
      prior[b] = 1.0 / AgeBuckets::width(b);
    }
  }
  return prior;
}

const ReuseRates::ByAge& ReuseRates::rates(ReuseClass c) {
  constexpr int kReach = 4;
  Class& entry = counted(c);
  if (entry.fit == num_fits_) return entry.rates;
  const ByAge parent = prior(c);
  for (int b = 0; b < kAges; ++b) {
    double reuses = 0.0, expected = 0.0;
    for (int near = std::max(b - kReach, 0); near <= std::min(b + kReach, kAges - 1); ++near) {
      const double weight = 1.0 / (1 << std::abs(near - b));
      reuses += weight * entry.reuses[near];
      expected += weight * entry.exposure[near] * parent[near];
    }
    entry.rates[b] = parent[b] * (kShrinkage + reuses) / (kShrinkage + expected);
  }
  entry.fit = num_fits_;
  return entry.rates;
}

double ReuseRates::relative_risk(int trait, int bin) const {
  return std::pow((kShrinkage + observed_[trait][bin]) / (kShrinkage + expected_[trait][bin]), kTraitPower);
}

int ReuseRates::risk_level(const ReuseTraits& traits) const {
  double risk = 1.0;
  for (int t = 0; t < ReuseTraits::kCount; ++t) risk *= relative_risk(t, traits.bins[t]);
  const int level = kNeutralLevel + static_cast<int>(std::lround(kLevelsPerOctave * std::log2(risk)));
  return std::clamp(level, 0, kRiskLevels - 1);
}

const ReuseRates::Prospects& ReuseRates::prospects(ReuseClass c, int risk_level) {
  const int of = c.id * kRiskLevels + risk_level;
  Prospects& entry = prospects_[(5 * c.id + risk_level) % kProspectsKept];
  if (entry.fit == num_fits_ && entry.of == of) return entry;
  const ByAge& by_age = rates(c);
  const double risk = std::exp2((risk_level - kNeutralLevel) / kLevelsPerOctave);
  for (int b = 0; b < kAges; ++b) {
    const double rate = by_age[b] * risk;
    const double width = AgeBuckets::width(b);
    entry.survival[b] = std::exp(-rate * width);
    entry.held[b] = rate * width > 1e-9 ? (1.0 - entry.survival[b]) / rate : width;
  }
  entry.fit = num_fits_;
  entry.of = of;
  return entry;
}

double ReuseRates::index(ReuseClass c, int risk_level, int bucket) {
  const Prospects& ahead = prospects(c, risk_level);
  double alive = 1.0, time = 0.0, best_reuse = 0.0, best_time = 1.0;
  for (int b = bucket; b < kAges; ++b) {
    time += alive * ahead.held[b];
    alive *= ahead.survival[b];
    if ((1.0 - alive) * best_time > best_reuse * time) {
      best_reuse = 1.0 - alive;
      best_time = time;
    }
  }
  return best_reuse / best_time;
}

std::size_t ReuseRates::bytes() const {
  std::size_t bytes = classes_.size() * sizeof(classes_[0]) + prospects_.size() * sizeof(Prospects);
  for (const auto& entry : classes_) bytes += entry == nullptr ? 0 : sizeof(Class);
  return bytes;
}

}  // namespace caudex
