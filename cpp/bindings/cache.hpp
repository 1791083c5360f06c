// caudex._core.PrefixCache, as Python holds it.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "shared_cache.hpp"

namespace caudex {

struct PyCache {
  std::shared_ptr<SharedCache> shared;
  std::shared_ptr<nanobind::object> policy;  // written in Python, or null
};

using CacheClass = nanobind::class_<PyCache>;

// Calls for many requests at once.
void bind_batches(CacheClass& cache);
// What a cache tells of itself.
void bind_inspection(CacheClass& cache);

}  // namespace caudex
