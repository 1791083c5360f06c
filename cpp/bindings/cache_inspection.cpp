// What a cache tells of itself: sizes, counters, changes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cache.hpp"
#include "cache_options.hpp"

namespace nb = nanobind;

namespace caudex {
namespace {

template <typename Get>
auto counter(Get get) {
  return [get](PyCache& self) { return self.shared->locked([&](PrefixCache& cache) { return (cache.*get)(); }); };
}

nb::list take_events(PyCache& self) {
  std::vector<CacheEvent> events;
  std::vector<std::string> spaces;
  self.shared->locked([&](PrefixCache& cache) {
    events = cache.take_events();
    for (const CacheEvent& event : events) spaces.push_back(cache.space_name(event.space));
  });
  nb::list out;
  for (std::size_t i = 0; i < events.size(); ++i) {
    const CacheEvent& event = events[i];
    if (event.kind == CacheEvent::Kind::kCleared) {
      out.append(nb::make_tuple("cleared"));
    } else if (event.kind == CacheEvent::Kind::kRemoved) {
      out.append(nb::make_tuple("removed", event.blocks));
    } else {
      nb::object parent = event.has_parent ? nb::cast(event.parent) : nb::none();
      out.append(nb::make_tuple("stored", event.blocks, parent, event.tokens, spaces[i]));
    }
  }
  return out;
}

}  // namespace

void bind_inspection(CacheClass& cache) {
  cache
      .def("enable_events",
           [](PyCache& self, std::int64_t max_blocks) {
             const std::uint32_t count = to_option(max_blocks, "max_blocks", 1, kMaxBlocks);
             self.shared->locked([&](PrefixCache& cache) { cache.enable_events(count); });
           },
           nb::arg("max_blocks") = 1 << 20, "Collects changes for take_events().")
      .def("take_events", &take_events,
           "The changes since the last call: ('stored', hashes, parent or None, tokens, namespace), ('removed', hashes), "
           "('cleared',).")
      .def_prop_ro("num_blocks", counter(&PrefixCache::num_blocks))
      .def_prop_ro("block_size", counter(&PrefixCache::block_size))
      .def_prop_ro("num_free_blocks", counter(&PrefixCache::num_free))
      .def_prop_ro("num_cached_blocks", counter(&PrefixCache::num_cached), "Evictable blocks of the tree.")
      .def_prop_ro("num_pinned_blocks", counter(&PrefixCache::num_pinned), "Blocks of running requests.")
      .def_prop_ro("num_available_blocks", counter(&PrefixCache::num_available), "Free and evictable blocks.")
      .def_prop_ro("num_nodes", counter(&PrefixCache::num_nodes), "Nodes of the tree, one a namespace included.")
      .def_prop_ro("num_bytes", counter(&PrefixCache::bytes), "Memory held for the blocks in use, all counted.")
      .def("stats",
           [](PyCache& self, std::optional<std::string> space) {
             return self.shared->locked([&](PrefixCache& cache) { return space ? cache.stats(*space) : cache.stats(); });
           },
           nb::arg("namespace").none() = nb::none(),
           "Counters of one namespace since it was last forgotten, see namespaces(); or of all together since the start.")
      .def("occupancy",
           [](PyCache& self, std::optional<std::string> space) {
             return self.shared->locked(
                 [&](PrefixCache& cache) { return space ? cache.occupancy(*space) : cache.occupancy(); });
           },
           nb::arg("namespace").none() = nb::none(),
           "What lies in the pool of one namespace, or of all together. Walks the tree.")
      .def("namespaces",
           [](PyCache& self) { return self.shared->locked([](PrefixCache& cache) { return cache.spaces(); }); },
           "The namespaces in use, and those seen of late. Beyond some hundreds, one without a block, a request, a pin and "
           "a registered prefix is forgotten: its counters live on in the sum of all.")
      .def("check_invariants",
           [](PyCache& self) { self.shared->locked([](PrefixCache& cache) { cache.check_invariants(); }); },
           "Raises RuntimeError if the cache contradicts itself. Walks everything: for tests and idle times.")
      .def("dump",
           [](PyCache& self) { return self.shared->locked([](PrefixCache& cache) { return cache.dump(); }); },
           "The tree as text, one line a node.");
}

}  // namespace caudex
