// How soon blocks are wanted again, learned from the traffic.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace caudex {

// Ages in seconds since the last touch, in buckets of a third of an octave from half a second on.
struct AgeBuckets {
  static constexpr int kCount = 64;

  static double begin(int bucket);  // bucket 0 begins at 0
  static double width(int bucket) { return begin(bucket + 1) - begin(bucket); }
};

// What is known of blocks when they are touched. Blocks of one class are taken to be wanted again at one rate by age.
//
//   everything -- by touches -- by touches and turn
//              -- superseded, ended, by announced return
class ReuseClass {
 public:
  static constexpr int kTouchBins = 16;
  static constexpr int kTurnBins = 8;
  static constexpr int kCount = 3 + kTouchBins + kTouchBins * kTurnBins + AgeBuckets::kCount;

  static ReuseClass of(std::uint32_t touches, std::uint32_t turn);
  static ReuseClass superseded() { return ReuseClass(1); }  // left behind where a request took another way
  static ReuseClass ended() { return ReuseClass(2); }       // the caller says that its conversation is over
  static ReuseClass returning_in(double seconds);           // the caller says when

  explicit ReuseClass(int id) : id(static_cast<std::uint16_t>(id)) {}
  bool operator==(ReuseClass other) const { return id == other.id; }
  ReuseClass parent() const;

  std::uint16_t id;
};

// Traits of the request that touched last, each in bins of two octaves.
struct ReuseTraits {
  static constexpr int kCount = 3;
  static constexpr int kBins = 12;

  // `interval` is the time between the conversation's last two touches, negative if this is its first.
  static ReuseTraits of(std::uint64_t new_tokens, std::uint64_t output_tokens, double interval);

  std::array<std::uint8_t, kCount> bins{};
};

// Hazard rates of reuse by class and age, and the Gittins index that they give.
//
// Reuse and exposure (block-seconds at risk) are counted by class and age. A class's rate shrinks to its parent's:
//     rate = parent's rate x (4 + reuses) / (4 + parent's rate x exposure),
// counts smoothed over neighbouring ages by halves; the root's prior is 0.3 / age. Traits multiply the rate by
// relative risks, to the power 0.7.
//
// Counting is O(depth of the class). After fit(), the rates of a class and the indices of a class and risk level are
// computed when they are first asked for.
class ReuseRates {
 public:
  static constexpr int kRiskLevels = 16;

  ReuseRates() : classes_(ReuseClass::kCount), prospects_(kProspectsKept) {}

  // `blocks` (by weight) of this class were touched again at an age in `bucket`, after `seconds` in it.
  void count_reuse(ReuseClass c, const ReuseTraits& traits, int bucket, double blocks, double seconds);
  // They have lived through so much of it and were not.
  void count_exposure(ReuseClass c, const ReuseTraits& traits, int bucket, double block_seconds);

  // From now on, rates and indices take account of all that has been counted.
  void fit() { ++num_fits_; }

  // The product of the traits' relative risks, as a level.
  int risk_level(const ReuseTraits& traits) const;

  // max over T > age of P(reuse by T) / E[time until reuse or T]: hits for each second that a block is held.
  // (J. C. Gittins, "Bandit processes and allocation indices", 1979.)
  double index(ReuseClass c, int risk_level, int bucket);

  std::size_t bytes() const;

 private:
  using ByAge = std::array<double, AgeBuckets::kCount>;

  struct Class {
    ByAge reuses{}, exposure{};
    ByAge rates{};
    std::uint32_t fit = 0;  // the fit that the rates belong to
  };

  // What awaits a block that is alive at the beginning of a bucket.
  struct Prospects {
    ByAge survival{};  // chance that it is not wanted before the bucket's end
    ByAge held{};      // seconds until then or until it is wanted
    std::uint32_t fit = 0;
    int of = 0;  // class and risk level
  };
  static constexpr int kProspectsKept = 32;

  Class& counted(ReuseClass c);
  const ByAge& rates(ReuseClass c);
  ByAge prior(ReuseClass c);
  double relative_risk(int trait, int bin) const;
  const Prospects& prospects(ReuseClass c, int risk_level);

  std::vector<std::unique_ptr<Class>> classes_;  // those that have been met
  std::vector<Prospects> prospects_;             // the latest, by a hash of class and risk level
  std::array<std::array<double, ReuseTraits::kBins>, ReuseTraits::kCount> observed_{}, expected_{};
  std::uint32_t num_fits_ = 1;
};

}  // namespace caudex
