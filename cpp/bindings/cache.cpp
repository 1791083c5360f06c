#include "cache.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "cache_options.hpp"
#include "prompt.hpp"
#include "python_policy.hpp"
#include "sequence.hpp"

namespace nb = nanobind;

namespace caudex {

void bind_results(nb::module_& m);
void bind_hashing(nb::module_& m);

namespace {

// A policy may refer to its own cache: the garbage collector has to see that.
int traverse_cache(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const PyCache* cache = nb::inst_ptr<PyCache>(self);
  if (cache->policy != nullptr) Py_VISIT(cache->policy->ptr());
  return 0;
}

int clear_cache(PyObject* self) {
  PyCache* cache = nb::inst_ptr<PyCache>(self);
  if (cache->policy != nullptr) *cache->policy = nb::none();
  return 0;
}

PyType_Slot cache_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_cache)},
                             {Py_tp_clear, reinterpret_cast<void*>(clear_cache)},
                             {0, nullptr}};

template <typename Call>
auto call(PyCache& self, const PromptArgument& prompt, Call run) {
  return prompt.is_long() ? self.shared->locked_without_gil(run) : self.shared->locked(run);
}

using Start = void (PrefixCache::*)(Sequence&, const Prompt&);

template <Start start>
PySequence begin(PyCache& self, nb::handle tokens, const std::string& space, const std::string& tenant,
                 nb::handle content, std::optional<SessionHints> hints) {
  PromptArgument prompt(tokens, space, tenant, content);
  PySequence sequence(self.shared);
  if (hints) sequence.state->hints = *hints;
  call(self, prompt, [&](PrefixCache& cache) { (cache.*start)(*sequence.state, *prompt); });
  return sequence;
}

}  // namespace

void bind_cache(nb::module_& m) {
  nb::exception<OutOfBlocks>(m, "OutOfBlocks", PyExc_RuntimeError);
  bind_results(m);
  bind_sequence(m);
  bind_policy(m);
  bind_hashing(m);
  m.def("policy_names", &policy_names, "The eviction policies that can be chosen by name.");

  CacheClass cache(m, "PrefixCache", nb::type_slots(cache_slots),
                   "The compiled part of caudex.cache.PrefixCache, which documents it.");
  cache
      .def("__init__",
           [](PyCache* self, std::int64_t num_blocks, std::int64_t block_size, const std::string& index,
              nb::handle policy, const std::string& hash, std::optional<std::uint64_t> secret,
              std::optional<std::int64_t> thrash_window, const std::string& sharing, std::int64_t k,
              std::optional<std::int64_t> pin_budget, bool manual_clock) {
             std::shared_ptr<nb::object> held;
             const CacheOptions options = make_options(num_blocks, block_size, index, policy, hash, secret, thrash_window,
                                                       sharing, k, pin_budget, &held);
             new (self) PyCache{std::make_shared<SharedCache>(options, manual_clock), std::move(held)};
           },
           nb::arg("num_blocks"), nb::arg("block_size") = 16, nb::kw_only(), nb::arg("index") = "radix",
           nb::arg("policy") = "lru", nb::arg("hash") = "fold64", nb::arg("secret").none() = nb::none(),
           nb::arg("thrash_window").none() = nb::none(), nb::arg("sharing") = "isolated", nb::arg("k") = 2,
           nb::arg("pin_budget").none() = nb::none(), nb::arg("manual_clock") = false)
      .def("match",
           [](PyCache& self, nb::handle tokens, const std::string& space, const std::string& tenant, nb::handle content) {
             PromptArgument prompt(tokens, space, tenant, content);
             return call(self, prompt, [&](PrefixCache& cache) { return cache.match(*prompt); });
           },
           nb::arg("tokens"), nb::arg("namespace") = "", nb::kw_only(), nb::arg("tenant") = "",
           nb::arg("content").none() = nb::none(),
           "The longest cached prefix of `tokens`, at most len(tokens) - 1. Pins and touches nothing.")
      .def("explain",
           [](PyCache& self, nb::handle tokens, const std::string& space, const std::string& tenant, nb::handle content) {
             PromptArgument prompt(tokens, space, tenant, content);
             return call(self, prompt, [&](PrefixCache& cache) { return cache.explain(*prompt); });
           },
           nb::arg("tokens"), nb::arg("namespace") = "", nb::kw_only(), nb::arg("tenant") = "",
           nb::arg("content").none() = nb::none(),
           "Why match() finds no more than it does. For the operator: it looks across namespaces and tenants.")
      .def("begin", &begin<&PrefixCache::begin>, nb::arg("tokens"), nb::arg("namespace") = "", nb::kw_only(),
           nb::arg("tenant") = "", nb::arg("content").none() = nb::none(), nb::arg("hints").none() = nb::none(),
           "Starts a request: matches and pins the longest cached prefix, atomically.")
      .def("resume", &begin<&PrefixCache::resume>, nb::arg("tokens"), nb::arg("namespace") = "", nb::kw_only(),
           nb::arg("tenant") = "", nb::arg("content").none() = nb::none(), nb::arg("hints").none() = nb::none(),
           "begin() for a request that goes on after a preemption: its look-up does not count as a hit or a miss.")
      .def("pin",
           [](PyCache& self, nb::handle tokens, const std::string& space, const std::string& tenant, nb::handle content) {
             PromptArgument prompt(tokens, space, tenant, content);
             PySequence pin(self.shared);
             call(self, prompt, [&](PrefixCache& cache) { cache.pin(*pin.state, *prompt); });
             return PyPin{std::move(pin)};
           },
           nb::arg("tokens"), nb::arg("namespace") = "", nb::kw_only(), nb::arg("tenant") = "",
           nb::arg("content").none() = nb::none(),
           "Keeps what is cached of `tokens`, in whole blocks, until the pin is released. Raises OutOfBlocks beyond "
           "the pin budget.")
      .def("register_public",
           [](PyCache& self, nb::handle tokens, const std::string& space) {
             PromptArgument prompt(tokens, space, "", nb::none());
             call(self, prompt, [&](PrefixCache& cache) { cache.register_public(*prompt); });
           },
           nb::arg("tokens"), nb::arg("namespace") = "",
           "With sharing='public': all tenants of the namespace may share these tokens.")
      .def("resize",
           [](PyCache& self, std::int64_t num_blocks) {
             const std::uint32_t count = to_option(num_blocks, "num_blocks", 1, kMaxBlocks);
             return self.shared->locked_without_gil([&](PrefixCache& cache) { return cache.resize(count); });
           },
           nb::arg("num_blocks"),
           "Makes the pool larger or smaller while in use, evicting if it must; OutOfBlocks if too much is pinned.\n\n"
           "Returns the block copies to execute before any later KV write, and before the KV tensors are cut.")
      .def("compact",
           [](PyCache& self) {
             return self.shared->locked_without_gil([](PrefixCache& cache) { return cache.compact(); });
           },
           "Moves blocks down so that the free ones lie together at the end; returns the block copies to execute.")
      .def("save",
           [](PyCache& self) {
             const std::string file = self.shared->locked_without_gil([](PrefixCache& cache) { return cache.save(); });
             return nb::bytes(file.data(), file.size());
           },
           "The index as bytes, without KV: for tiers, and for whoever has to start again.")
      .def("load",
           [](PyCache& self, nb::bytes file) {
             const std::string_view bytes(file.c_str(), file.size());
             self.shared->locked_without_gil([&](PrefixCache& cache) { cache.load(bytes); });
           },
           nb::arg("file"),
           "Takes over a saved index, block numbers and order of eviction (LRU) included, into an empty cache of the same "
           "block size, index and sharing policy. A file that is truncated, damaged or foreign raises ValueError, and "
           "nothing of it is taken.")
      .def("clear",
           [](PyCache& self) { self.shared->locked_without_gil([](PrefixCache& cache) { cache.clear(); }); },
           "Evicts all that is not pinned.")
      .def("set_time",
           [](PyCache& self, double seconds) {
             self.shared->locked([&](PrefixCache& cache) { cache.set_time(seconds); });
           },
           nb::arg("seconds"), "Sets the clock that policies see; only kept with manual_clock=True.");
  bind_batches(cache);
  bind_inspection(cache);
}

}  // namespace caudex
