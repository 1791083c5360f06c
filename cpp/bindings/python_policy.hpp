// Eviction policies written in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "cache/prefix_cache.hpp"

namespace caudex {

// Sets the policy of a cache: the name of a built-in one, or a Python object with the six verbs. Returns the reference to
// that object which the options share (null for a built-in policy), for the garbage collector.
std::shared_ptr<nanobind::object> set_policy(CacheOptions& options, nanobind::handle policy);

void bind_policy(nanobind::module_& m);

}  // namespace caudex
