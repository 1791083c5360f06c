#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "routing/block_directory.hpp"
#include "routing/chain_keys.hpp"
#include "routing/cost.hpp"
#include "routing/prefix_tree.hpp"
#include "routing/rendezvous.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace caudex {
namespace {

using routing::BlockDirectory;
using routing::Key;
using routing::PrefixTree;

using Keys = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Column = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::uint32_t kMaxWorkers = 1'000'000;

std::uint32_t checked_worker(std::int64_t worker) {
  if (worker < 0 || worker > kMaxWorkers) {
    throw nb::value_error(("worker " + std::to_string(worker) + " is not between 0 and 1000000").c_str());
  }
  return static_cast<std::uint32_t>(worker);
}

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> owned_array(std::size_t size, T** data) {
  *data = new T[size];
  nb::capsule owner(*data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(*data, {size}, owner);
}

auto chain(Key root, const void* data, std::size_t num_bytes, std::size_t chunk_bytes) {
  if (chunk_bytes == 0) throw nb::value_error("the chunk size must be at least 1");
  std::uint64_t* keys;
  auto array = owned_array<std::uint64_t>(num_bytes / chunk_bytes, &keys);
  routing::chain_bytes(root, data, num_bytes, chunk_bytes, keys);
  return array;
}

template <typename Index>
auto match(const Index& index, const Keys& keys, std::int64_t num_workers) {
  std::int32_t* matched;
  auto array = owned_array<std::int32_t>(checked_worker(num_workers), &matched);
  index.match(keys.data(), keys.size(), matched, array.size());
  return array;
}

template <typename Index>
auto held(const Index& index, std::int64_t num_workers) {
  std::int64_t* counts;
  auto array = owned_array<std::int64_t>(checked_worker(num_workers), &counts);
  index.held(counts, array.size());
  return array;
}

/// The leading keys that each worker holds, in tokens; of a whole prompt one token is always left to compute.
template <typename Index>
auto cached_tokens(const Index& index, const Keys& keys, std::int64_t num_workers, double tokens_per_key,
                   double num_tokens) {
  std::vector<std::int32_t> matched(checked_worker(num_workers));
  index.match(keys.data(), keys.size(), matched.data(), matched.size());
  double* cached;
  auto array = owned_array<double>(matched.size(), &cached);
  for (std::size_t i = 0; i < matched.size(); ++i) cached[i] = std::min(matched[i] * tokens_per_key, num_tokens - 1.0);
  return array;
}

template <typename Index>
auto used_tokens(const Index& index, std::int64_t num_workers, double tokens_per_key) {
  std::vector<std::int64_t> counts(checked_worker(num_workers));
  index.held(counts.data(), counts.size());
  double* used;
  auto array = owned_array<double>(counts.size(), &used);
  for (std::size_t i = 0; i < counts.size(); ++i) used[i] = static_cast<double>(counts[i]) * tokens_per_key;
  return array;
}

void bind_keys(nb::module_& m) {
  m.def(
      "root_key", [](nb::bytes name) { return routing::root_key(name.data(), name.size()); }, "name"_a,
      "The key that prompts of one namespace start from.");
  m.def(
      "chain_bytes",
      [](Key root, nb::bytes data, std::size_t chunk_bytes) {
        return chain(root, data.data(), data.size(), chunk_bytes);
      },
      "root"_a, "data"_a, "chunk_bytes"_a, "Chain keys of the whole chunks of a text: uint64, one a chunk.");
  m.def(
      "chain_tokens",
      [](Key root, const Tokens& tokens, std::size_t block_size) {
        return chain(root, tokens.data(), tokens.size() * sizeof(std::int32_t), block_size * sizeof(std::int32_t));
      },
      "root"_a, "tokens"_a, "block_size"_a, "Chain keys of the whole blocks of int32 tokens: uint64, one a block.");
}

const double* checked_column(const Column& column, std::size_t num_workers) {
  if (column.size() != num_workers) {
    throw nb::value_error(("a column has " + std::to_string(column.size()) + " rows for " +
                           std::to_string(num_workers) + " workers")
                              .c_str());
  }
  return column.data();
}

void bind_cost(nb::module_& m) {
  m.def(
      "cost_seconds",
      [](const Mask& eligible, const Column& queued_tokens, const Column& running, const Column& foreign_requests,
         const Column& recent_tokens, const Column& recent_requests,
         const Column& prefill_rate, const Column& capacity_tokens, const Column& cached_tokens,
         const Column& used_tokens, const Column& busy_tokens, const Column& shared_tokens, double num_tokens,
         double mean_prompt_tokens, double recent_seconds, double stay_seconds, double reuse, double decode_tokens, double harm_weight) {
        const std::size_t n = eligible.size();
        const routing::WorkerColumns workers{eligible.data(),
                                             checked_column(queued_tokens, n),
                                             checked_column(running, n),
                                             checked_column(foreign_requests, n),
                                             checked_column(recent_tokens, n),
                                             checked_column(recent_requests, n),
                                             checked_column(prefill_rate, n),
                                             checked_column(capacity_tokens, n),
                                             checked_column(cached_tokens, n),
                                             checked_column(used_tokens, n),
                                             checked_column(busy_tokens, n),
                                             checked_column(shared_tokens, n),
                                             n};
        const routing::CostTerms terms{num_tokens, mean_prompt_tokens, recent_seconds, stay_seconds, reuse,
                                       decode_tokens, harm_weight};
        double* seconds;
        auto array = owned_array<double>(n, &seconds);
        routing::cost_seconds(workers, terms, seconds);
        return array;
      },
      "eligible"_a, "queued_tokens"_a, "running"_a, "foreign_requests"_a, "recent_tokens"_a,
      "recent_requests"_a, "prefill_rate"_a, "capacity_tokens"_a, "cached_tokens"_a, "used_tokens"_a,
      "busy_tokens"_a, "shared_tokens"_a, nb::kw_only(), "num_tokens"_a, "mean_prompt_tokens"_a, "recent_seconds"_a,
      "stay_seconds"_a, "reuse"_a, "decode_tokens"_a,
      "harm_weight"_a, "Seconds that sending a request to each worker costs; see caudex.routing.cost.");
  m.def(
      "cheapest",
      [](const Column& cost, const std::optional<Column>& used, const std::optional<Column>& capacity,
         const nb::callable& draw) {
        const std::size_t n = cost.size();
        const routing::Room room{used ? checked_column(*used, n) : nullptr,
                                 capacity ? checked_column(*capacity, n) : nullptr};
        return routing::cheapest(cost.data(), room, n, [&] { return nb::cast<double>(draw()); });
      },
      "cost"_a, "used"_a.none(), "capacity"_a.none(), "draw"_a,
      "The row of the lowest cost, or -1 if none is finite. Equal costs: the most of the capacity left unused, then by "
      "draw(), in [0, 1).");
  m.def(
      "largest",
      [](const Column& column) {
        return column.size() == 0 ? 0.0 : *std::max_element(column.data(), column.data() + column.size());
      },
      "column"_a, "The largest value of a column; 0 if it has none.");
}

void bind_rendezvous(nb::module_& m) {
  m.def(
      "rendezvous",
      [](const Mask& eligible, const Keys& workers, const Column& load, Key key, double num_tokens,
         double load_factor) {
        const std::size_t n = eligible.size();
        if (workers.size() != n) throw nb::value_error("every worker needs a hash");
        double* cost;
        auto array = owned_array<double>(n, &cost);
        const bool is_loaded = routing::rendezvous(eligible.data(), workers.data(), checked_column(load, n), n, key,
                                                   num_tokens, load_factor, cost);
        return std::make_pair(array, is_loaded);
      },
      "eligible"_a, "workers"_a, "load"_a, "key"_a, nb::kw_only(), "num_tokens"_a, "load_factor"_a,
      "Costs by the highest hash of key and worker within bounds of load, and whether the one that the hash names is "
      "over them; see caudex.routing.consistent_hash.");
}

void bind_prefix_tree(nb::module_& m) {
  nb::class_<PrefixTree>(m, "PrefixTree", "Which worker was sent which prefixes; see caudex.routing.prefix.")
      .def(nb::init<std::size_t>(), "default_capacity"_a)
      .def(
          "set_capacity",
          [](PrefixTree& self, std::int64_t worker, std::size_t num_keys) {
            self.set_capacity(checked_worker(worker), num_keys);
          },
          "worker"_a, "num_keys"_a)
      .def("match", &match<PrefixTree>, "keys"_a, "num_workers"_a,
           "Leading keys that each worker below num_workers was sent before: int32, one a worker.")
      .def(
          "insert",
          [](PrefixTree& self, std::int64_t worker, const Keys& keys, double now) {
            self.insert(checked_worker(worker), keys.data(), keys.size(), now);
          },
          "worker"_a, "keys"_a, "now"_a, "Records that the worker was sent these keys at `now` (seconds).")
      .def(
          "expire",
          [](PrefixTree& self, std::int64_t worker, double time) { self.expire(checked_worker(worker), time); },
          "worker"_a, "time"_a, "Drops what the worker was last sent before `time`.")
      .def("expire_all", &PrefixTree::expire_all, "time"_a, "expire() for every worker.")
      .def(
          "sent_since",
          [](PrefixTree& self, double time, const Keys& keys, std::int64_t num_workers, double tokens_per_key,
             double num_tokens) {
            self.expire_all(time);
            return std::make_pair(used_tokens(self, num_workers, tokens_per_key),
                                  cached_tokens(self, keys, num_workers, tokens_per_key, num_tokens));
          },
          "time"_a, "keys"_a, "num_workers"_a, "tokens_per_key"_a, "num_tokens"_a,
          "expire_all(time), then used_tokens() and cached_tokens() of what is left.")
      .def(
          "forget", [](PrefixTree& self, std::int64_t worker) { self.forget(checked_worker(worker)); }, "worker"_a,
          "Drops all that the worker holds.")
      .def(
          "num_keys",
          [](const PrefixTree& self, std::int64_t worker) { return self.num_keys(checked_worker(worker)); },
          "worker"_a)
      .def("held", &held<PrefixTree>, "num_workers"_a,
           "Keys that each worker below num_workers holds: int64, one a worker.")
      .def("cached_tokens", &cached_tokens<PrefixTree>, "keys"_a, "num_workers"_a, "tokens_per_key"_a, "num_tokens"_a,
           "match() in tokens, at most num_tokens - 1: float64, one a worker.")
      .def("used_tokens", &used_tokens<PrefixTree>, "num_workers"_a, "tokens_per_key"_a,
           "held() in tokens: float64, one a worker.")
      .def_prop_ro("num_nodes", &PrefixTree::num_nodes)
      .def_prop_ro("num_bytes", &PrefixTree::num_bytes)
      .def("dump",
           [](const PrefixTree& self) {
             const std::string bytes = self.dump();
             return nb::bytes(bytes.data(), bytes.size());
           })
      .def(
          "load",
          [](PrefixTree& self, nb::bytes bytes) { self.load(std::string(bytes.c_str(), bytes.size())); },
          "snapshot"_a, "Replaces the tree; ValueError if the bytes did not come from dump().")
      .def("check_invariants", &PrefixTree::check_invariants);
}

void bind_block_directory(nb::module_& m) {
  nb::class_<BlockDirectory>(m, "BlockDirectory", "Which worker holds which blocks, from KV events.")
      .def(nb::init<std::size_t>(), "block_size"_a)
      .def(
          "store",
          [](BlockDirectory& self, std::int64_t worker, Key parent, const Keys& hashes, const Tokens& tokens) {
            if (tokens.size() != hashes.size() * self.block_size()) {
              throw nb::value_error(("expected " + std::to_string(hashes.size() * self.block_size()) + " tokens for " +
                                     std::to_string(hashes.size()) + " blocks, got " + std::to_string(tokens.size()))
                                        .c_str());
            }
            self.store(checked_worker(worker), parent, hashes.data(), hashes.size(), tokens.data());
          },
          "worker"_a, "parent"_a, "hashes"_a, "tokens"_a,
          "The worker stored consecutive blocks below the chain key `parent`.")
      .def(
          "find",
          [](const BlockDirectory& self, std::int64_t worker, std::uint64_t hash) -> std::optional<Key> {
            Key key;
            if (!self.find(checked_worker(worker), hash, &key)) return std::nullopt;
            return key;
          },
          "worker"_a, "hash"_a, "The chain key of a block that the worker stored, or None.")
      .def(
          "remove",
          [](BlockDirectory& self, std::int64_t worker, const Keys& hashes) {
            self.remove(checked_worker(worker), hashes.data(), hashes.size());
          },
          "worker"_a, "hashes"_a)
      .def(
          "clear", [](BlockDirectory& self, std::int64_t worker) { self.clear(checked_worker(worker)); }, "worker"_a)
      .def("match", &match<BlockDirectory>, "keys"_a, "num_workers"_a,
           "Leading blocks that each worker below num_workers holds: int32, one a worker.")
      .def("cached_tokens", &cached_tokens<BlockDirectory>, "keys"_a, "num_workers"_a, "tokens_per_key"_a,
           "num_tokens"_a, "match() in tokens, at most num_tokens - 1: float64, one a worker.")
      .def("used_tokens", &used_tokens<BlockDirectory>, "num_workers"_a, "tokens_per_key"_a,
           "Blocks that each worker below num_workers holds, in tokens: float64, one a worker.")
      .def(
          "num_blocks",
          [](const BlockDirectory& self, std::int64_t worker) { return self.num_blocks(checked_worker(worker)); },
          "worker"_a)
      .def_prop_ro("block_size", &BlockDirectory::block_size);
}

}  // namespace

void bind_routing(nb::module_& m) {
  bind_keys(m);
  bind_cost(m);
  bind_rendezvous(m);
  bind_prefix_tree(m);
  bind_block_directory(m);
}

}  // namespace caudex
