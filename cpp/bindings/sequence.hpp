// Requests and pins, as Python holds them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "shared_cache.hpp"

namespace caudex {

// What PrefixCache.begin(), resume() and fork() hand out. Keeps its cache alive; released at the cache's next call if it is
// dropped while running.
struct PySequence {
  std::shared_ptr<SharedCache> cache;
  std::unique_ptr<Sequence> state = std::make_unique<Sequence>();

  explicit PySequence(std::shared_ptr<SharedCache> cache) : cache(std::move(cache)) {}
  PySequence(PySequence&&) = default;
  ~PySequence() {
    if (state != nullptr && state->running) cache->abandon(std::move(state));
  }

  const Sequence& running() const {
    if (!state->running) throw std::invalid_argument("this sequence has been released: begin() a new one");
    return *state;
  }
};

// What PrefixCache.pin() hands out.
struct PyPin {
  PySequence held;
};

void bind_sequence(nanobind::module_& m);

}  // namespace caudex
