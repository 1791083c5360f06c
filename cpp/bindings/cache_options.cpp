#include "cache_options.hpp"

#include <stdexcept>
#include <utility>

#include "python_policy.hpp"

namespace nb = nanobind;

namespace caudex {
namespace {

Grain to_grain(const std::string& index) {
  if (index == "radix") return Grain::kToken;
  if (index == "hash") return Grain::kBlock;
  throw std::invalid_argument("unknown index '" + index + "': choose 'radix' or 'hash'");
}

Sharing to_sharing(const std::string& name) {
  if (name == "isolated") return Sharing::kIsolated;
  if (name == "shared") return Sharing::kShared;
  if (name == "public") return Sharing::kPublic;
  if (name == "k_anonymous") return Sharing::kAnonymous;
  throw std::invalid_argument("unknown sharing '" + name +
                              "': choose 'isolated', 'shared', 'public' or 'k_anonymous'");
}

}  // namespace

std::uint32_t to_option(std::int64_t value, const char* what, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return static_cast<std::uint32_t>(value);
  throw std::invalid_argument(std::string(what) + " must be from " + std::to_string(least) + " to " +
                              std::to_string(most) + ", got " + std::to_string(value));
}

CacheOptions make_options(std::int64_t num_blocks, std::int64_t block_size, const std::string& index,
                          nb::handle policy, const std::string& hash, std::optional<std::uint64_t> secret,
                          std::optional<std::int64_t> window, const std::string& sharing, std::int64_t k,
                          std::optional<std::int64_t> pin_budget,
                          std::shared_ptr<nb::object>* python_policy) {
  CacheOptions options;
  options.num_blocks = to_option(num_blocks, "num_blocks", 1, kMaxBlocks);
  options.block_size = to_option(block_size, "block_size", 1, 1 << 16);
  options.grain = to_grain(index);
  std::shared_ptr<nb::object> held = set_policy(options, policy);
  if (python_policy != nullptr) *python_policy = std::move(held);
  options.hash = hash;
  options.secret = secret ? *secret : random_secret();
  options.thrash_window = to_option(window.value_or(num_blocks / 2), "thrash_window", 0, kMaxBlocks);
  options.sharing = to_sharing(sharing);
  options.k = to_option(k, "k", 2, 1 << 16);
  options.pin_budget = to_option(pin_budget.value_or(num_blocks / 2), "pin_budget", 0, num_blocks);
  return options;
}

}  // namespace caudex
