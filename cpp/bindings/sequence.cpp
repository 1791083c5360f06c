#include "sequence.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>

#include "arrays.hpp"
#include "tokens.hpp"

namespace nb = nanobind;

namespace caudex {
namespace {

std::size_t to_count(std::int64_t value, const char* what) {
  if (value < 0) throw std::invalid_argument(std::string(what) + " cannot be negative, got " + std::to_string(value));
  return static_cast<std::size_t>(value);
}

void bind_hints(nb::module_& m) {
  nb::class_<SessionHints>(m, "SessionHints",
                           "What a caller knows of the conversation a request belongs to; policies may use it.")
      .def(nb::init<std::uint64_t, double, bool, double>(), nb::kw_only(), nb::arg("session") = 0,
           nb::arg("expected_return") = -1.0, nb::arg("ends") = false, nb::arg("priority") = 0.0)
      .def_ro("session", &SessionHints::session, "Equal for the requests of one conversation; 0 when unknown.")
      .def_ro("expected_return", &SessionHints::expected_return,
              "Seconds until the next request of the session; negative when unknown.")
      .def_ro("ends", &SessionHints::ends, "No request of this session will follow.")
      .def_ro("priority", &SessionHints::priority, "Higher is kept longer, by policies that look at it.");
}

void bind_running(nb::module_& m) {
  nb::class_<PySequence>(m, "CacheSequence",
                         "A running request: its tokens, its block table, and its pin on the cache.\n\n"
                         "Made by PrefixCache.begin(), resume() and fork(). After release() every use raises ValueError. A "
                         "sequence that is dropped without release() is released at the cache's next call.")
      .def_prop_ro("num_tokens", [](PySequence& self) { return self.running().tokens.size(); })
      .def_prop_ro("num_cached_tokens", [](PySequence& self) { return self.running().num_cached; },
                   "Found in the cache at the start; computing begins here.")
      .def_prop_ro("num_committed_tokens", [](PySequence& self) { return self.running().num_committed; })
      .def_prop_ro("is_released", [](PySequence& self) { return !self.state->running; })
      .def_prop_ro("tokens", [](PySequence& self) { return to_numpy(self.running().tokens); },
                   nb::rv_policy::move, "A copy, int32.")
      .def_prop_ro("block_table", [](PySequence& self) {
                     return self.cache->locked([&](PrefixCache&) { return to_numpy(self.running().table); });
                   },
                   nb::rv_policy::move,
                   "A copy, int32: the block of every `block_size` allocated slots. commit() may replace entries.")
      .def("allocate",
           [](PySequence& self, std::int64_t num_tokens) {
             const std::size_t count = to_count(num_tokens, "num_tokens");
             return self.cache->locked([&](PrefixCache& cache) { return cache.allocate(*self.state, count); });
           },
           nb::arg("num_tokens"),
           "Ensures slots for the first `num_tokens` tokens, evicting as needed, or raises OutOfBlocks and changes "
           "nothing.\n\nReturns the block copies that must be executed, in order, before any later KV write.")
      .def("append",
           [](PySequence& self, nb::object tokens) {
             TokenArgument ids(tokens);
             self.cache->locked([&](PrefixCache& cache) { cache.append(*self.state, ids.data(), ids.size()); });
           },
           nb::arg("tokens"), "Adds generated tokens.")
      .def("commit",
           [](PySequence& self, std::int64_t num_tokens) {
             const std::size_t count = to_count(num_tokens, "num_tokens");
             self.cache->locked([&](PrefixCache& cache) { cache.commit(*self.state, count); });
           },
           nb::arg("num_tokens"),
           "Says that the KV of the first `num_tokens` tokens has been written, so that they can be matched.\n\n"
           "Blocks that another request committed first take the place of this one's: read block_table again.")
      .def("set_hints",
           [](PySequence& self, const SessionHints& hints) {
             self.running();
             self.cache->locked([&](PrefixCache&) { self.state->hints = hints; });
           },
           nb::arg("hints"), "Replaces what is known of the conversation, before release().")
      .def("fork",
           [](PySequence& self) {
             PySequence child(self.cache);
             self.cache->locked([&](PrefixCache& cache) { cache.fork(*self.state, *child.state); });
             return child;
           },
           "A second request that shares all that is committed here. Takes one block if that ends inside a block, and "
           "raises OutOfBlocks if there is none; the copy is among those the next allocation returns.")
      .def("release",
           [](PySequence& self) {
             self.cache->locked([&](PrefixCache& cache) { cache.release(*self.state); });
           },
           "Ends the request: unpins its blocks. What is committed stays cached.");
}

void bind_pin(nb::module_& m) {
  nb::class_<PyPin>(m, "Pin", "A prefix that is kept until release(), or until this object is dropped.")
      .def_prop_ro("num_tokens", [](PyPin& self) { return self.held.running().num_cached; }, "In whole blocks.")
      .def_prop_ro("blocks", [](PyPin& self) { return to_numpy(self.held.running().table); }, nb::rv_policy::move)
      .def("release", [](PyPin& self) {
        self.held.cache->locked([&](PrefixCache& cache) { cache.release(*self.held.state); });
      });
}

}  // namespace

void bind_sequence(nb::module_& m) {
  bind_hints(m);
  bind_running(m);
  bind_pin(m);
}

}  // namespace caudex
