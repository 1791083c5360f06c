// Calls for many requests at once: a scheduler's step.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "cache.hpp"
#include "prompt.hpp"
#include "sequence.hpp"
#include "tokens.hpp"

namespace nb = nanobind;

namespace caudex {
namespace {

std::vector<Sequence*> states_of(PyCache& self, nb::list sequences) {
  std::vector<Sequence*> states;
  states.reserve(sequences.size());
  for (nb::handle item : sequences) {
    if (!nb::isinstance<PySequence>(item)) {
      throw nb::type_error(("a batch is a list of sequences, got " + std::string(nb::str(item.type()).c_str())).c_str());
    }
    auto& sequence = nb::cast<PySequence&>(item);
    if (sequence.cache != self.shared) throw std::invalid_argument("a sequence belongs to another cache");
    states.push_back(sequence.state.get());
  }
  return states;
}

BlockArray count_cached(PyCache& self, nb::list prompts, const std::string& space, const std::string& tenant) {
  std::vector<PromptArgument> arguments;
  arguments.reserve(prompts.size());
  for (nb::handle prompt : prompts) arguments.emplace_back(prompt, space, tenant, nb::none());
  std::vector<std::int32_t> counts(arguments.size());
  self.shared->locked_without_gil([&](PrefixCache& cache) {
    for (std::size_t i = 0; i < counts.size(); ++i) {
      counts[i] = static_cast<std::int32_t>(cache.count_cached(*arguments[i]));
    }
  });
  return to_numpy(std::move(counts));
}

}  // namespace

void bind_batches(CacheClass& cache) {
  cache
      .def("count_cached", &count_cached, nb::arg("prompts"), nb::arg("namespace") = "", nb::kw_only(),
           nb::arg("tenant") = "",
           "How many tokens match() would find, for each of several prompts, in one call: for ordering a queue.")
      .def("append_and_allocate",
           [](PyCache& self, nb::list sequences, nb::object tokens) {
             TokenArgument ids(tokens);
             std::vector<Sequence*> states = states_of(self, sequences);
             if (states.size() != ids.size()) {
               throw std::invalid_argument("got " + std::to_string(states.size()) + " sequences but " +
                                           std::to_string(ids.size()) + " tokens");
             }
             return self.shared->locked(
                 [&](PrefixCache& cache) { return cache.append_and_allocate(states, ids.data()); });
           },
           nb::arg("sequences"), nb::arg("tokens"),
           "For each running sequence one generated token and the slot it needs, in one call: all of them, or "
           "OutOfBlocks and no change. Returns the block copies to execute.")
      .def("commit_all",
           [](PyCache& self, nb::list sequences) {
             std::vector<Sequence*> states = states_of(self, sequences);
             self.shared->locked([&](PrefixCache& cache) { cache.commit_all(states); });
           },
           nb::arg("sequences"), "Commits every token of these sequences, in one call.");
}

}  // namespace caudex
