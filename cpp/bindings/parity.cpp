// caudex._core.VllmCache and SglangCache: the peers' rules, for predictions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>

#include "cache/parity/sglang_cache.hpp"
#include "cache/parity/vllm_cache.hpp"
#include "tokens.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace caudex {
namespace {

using parity::SglangCache;
using parity::SglangRequest;
using parity::VllmCache;
using parity::VllmRequest;

// A running request; not thread-safe, and ended when it is dropped.
template <typename Cache, typename Request>
struct PeerSequence {
  std::shared_ptr<Cache> cache;
  Request state;
  std::size_t num_cached = 0;

  PeerSequence(std::shared_ptr<Cache> cache, const TokenArgument& ids) : cache(std::move(cache)) {
    num_cached = this->cache->begin(state, ids.data(), ids.size());
  }
  PeerSequence(PeerSequence&& other) noexcept
      : cache(std::move(other.cache)), state(std::move(other.state)), num_cached(other.num_cached) {
    other.state = Request{};
  }
  ~PeerSequence() {
    if (state.running) cache->release(state);
  }

  Request& running() {
    if (!state.running) throw std::invalid_argument("this sequence has been released: begin() a new one");
    return state;
  }
};

std::size_t to_count(std::int64_t value) {
  if (value < 0) throw std::invalid_argument("num_tokens cannot be negative, got " + std::to_string(value));
  return static_cast<std::size_t>(value);
}

std::uint32_t to_size(std::int64_t value, const char* what, std::int64_t least) {
  if (value >= least && value <= (1 << 30)) return static_cast<std::uint32_t>(value);
  throw std::invalid_argument(std::string(what) + " must be at least " + std::to_string(least) + ", got " +
                              std::to_string(value));
}

template <typename Cache, typename Request>
auto bind_sequence(nb::module_& m, const char* name, const char* doc) {
  using S = PeerSequence<Cache, Request>;
  return nb::class_<S>(m, name, doc)
      .def_prop_ro("num_tokens", [](S& self) { return self.running().tokens.size(); })
      .def_prop_ro("num_cached_tokens", [](S& self) { return self.running(), self.num_cached; })
      .def("allocate", [](S& self, std::int64_t n) { self.cache->allocate(self.running(), to_count(n)); }, "num_tokens"_a)
      .def("append",
           [](S& self, nb::object tokens) {
             TokenArgument ids(tokens);
             self.cache->append(self.running(), ids.data(), ids.size());
           },
           "tokens"_a)
      .def("release", [](S& self) { self.cache->release(self.running()); });
}

}  // namespace

void bind_parity(nb::module_& m) {
  using VllmSequence = PeerSequence<VllmCache, VllmRequest>;
  using SglangSequence = PeerSequence<SglangCache, SglangRequest>;

  bind_sequence<VllmCache, VllmRequest>(m, "VllmSequence", "A request under vLLM's rules.")
      .def("commit", [](VllmSequence& self, std::int64_t n) { (void)self.running(), (void)to_count(n); }, "num_tokens"_a,
           "Does nothing: vLLM registers a block when it is allocated.")
      .def_prop_ro("block_table", [](VllmSequence& self) { return self.running().blocks; },
                   "Its blocks, by position; empty before the first allocation.");
  nb::class_<VllmCache>(m, "VllmCache", "vLLM's KV cache manager, rule by rule.")
      .def("__init__",
           [](VllmCache* self, std::int64_t num_blocks, std::int64_t block_size) {
             new (self) VllmCache(to_size(num_blocks, "num_blocks", 2), to_size(block_size, "block_size", 1));
           },
           "num_blocks"_a, "block_size"_a = 16)
      .def("begin",
           [](std::shared_ptr<VllmCache> self, nb::object tokens) { return VllmSequence(self, TokenArgument(tokens)); },
           "tokens"_a)
      .def("reset", &VllmCache::reset, "Forgets all that is cached. False, and nothing done, while a request holds blocks.")
      .def("eviction_order", &VllmCache::eviction_order, "The free queue: block ids, the next to be taken first.")
      .def_prop_ro("num_free_blocks", &VllmCache::num_free, "Blocks in the free queue, cached or not.")
      .def_prop_ro("num_evicted_blocks", &VllmCache::num_evicted);

  bind_sequence<SglangCache, SglangRequest>(m, "SglangSequence", "A request under SGLang's rules.")
      .def("commit", [](SglangSequence& self, std::int64_t n) { self.cache->commit(self.running(), to_count(n)); },
           "num_tokens"_a, "Inserts what is computed into the tree, in whole pages.");
  nb::class_<SglangCache>(m, "SglangCache", "SGLang's radix cache, rule by rule.")
      .def("__init__",
           [](SglangCache* self, std::int64_t num_pages, std::int64_t page_size) {
             new (self) SglangCache(to_size(num_pages, "num_pages", 1), to_size(page_size, "page_size", 1));
           },
           "num_pages"_a, "page_size"_a = 1)
      .def("begin",
           [](std::shared_ptr<SglangCache> self, nb::object tokens) {
             return SglangSequence(self, TokenArgument(tokens));
           },
           "tokens"_a)
      .def("reset", &SglangCache::reset, "Forgets all that is cached. False, and nothing done, while a request holds pages.")
      .def("eviction_order",
           [](const SglangCache& self) {
             nb::list order;
             for (const SglangCache::Leaf& leaf : self.eviction_order()) {
               order.append(nb::make_tuple(leaf.tokens, leaf.num_own));
             }
             return order;
           },
           "The leaves that may go, the next first: the tokens up to the leaf's end, and how many of them are its own.")
      .def_prop_ro("num_free_pages", &SglangCache::num_free)
      .def_prop_ro("num_evictable_pages", &SglangCache::num_evictable)
      .def_prop_ro("num_evicted_tokens", &SglangCache::num_evicted);
}

}  // namespace caudex
