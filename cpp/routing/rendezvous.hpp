#pragma once

#include <cstddef>
#include <cstdint>

#include "routing/chain_keys.hpp"

namespace caudex::routing {

/// Ranks workers for a key by the highest hash of both, those whose load is above `load_factor` times what the mean will
/// be with `num_tokens` more behind all others.
///
/// Writes costs from 0 to 1 by hash, one more for a loaded worker, infinity for one that is not eligible. Returns whether
/// the worker that the hash names is loaded, so that another takes its place. O(n).
bool rendezvous(const bool* eligible, const Key* workers, const double* load, std::size_t num_workers, Key key,
                double num_tokens, double load_factor, double* cost);

}  // namespace caudex::routing
