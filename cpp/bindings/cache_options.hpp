// The options of a cache as Python gives them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "cache/prefix_cache.hpp"

namespace caudex {

inline constexpr std::int64_t kMaxBlocks = 1 << 30;

// Throws std::invalid_argument unless least <= value <= most.
std::uint32_t to_option(std::int64_t value, const char* what, std::int64_t least, std::int64_t most);

// Throws std::invalid_argument that names the option, the value, and what was expected. `python_policy` receives the
// reference to a policy written in Python.
CacheOptions make_options(std::int64_t num_blocks, std::int64_t block_size, const std::string& index,
                          nanobind::handle policy, const std::string& hash, std::optional<std::uint64_t> secret,
                          std::optional<std::int64_t> window, const std::string& sharing, std::int64_t k,
                          std::optional<std::int64_t> pin_budget,
                          std::shared_ptr<nanobind::object>* python_policy = nullptr);

}  // namespace caudex
