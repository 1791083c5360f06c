// The options of a cache as Python gives them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cache/prefix_cache.hpp"

namespace caudex {

// Throws std::invalid_argument that names the option, the value, and what was expected.
CacheOptions make_options(std::int64_t num_blocks, std::int64_t block_size, const std::string& index,
                          const std::string& policy, const std::string& hash, std::optional<std::uint64_t> secret,
                          std::optional<std::int64_t> window, const std::string& sharing, std::int64_t k,
                          std::optional<std::int64_t> pin_budget);

}  // namespace caudex
