#include "cache/offline/block_paths.hpp"
#include "cache/offline/clairvoyant.hpp"
#include "cache/offline/distinct_ids.hpp"
#include "cache/offline/hit_curve.hpp"
#include "cache/offline/path_tree_builder.hpp"
#include "cache/offline/replay.hpp"
#include "cache_options.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace caudex {
namespace {

using offline::BlockPaths;

template <class T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Integers = Input<std::int64_t>;
using Output = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

Output to_numpy(std::vector<std::int64_t>&& values) {
  auto* owned = new std::vector<std::int64_t>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<std::int64_t>*>(p); });
  return Output(owned->data(), {owned->size()}, owner);
}

template <class Array>
auto* column(const Array& array, std::size_t expected, const char* name) {
  if (array.shape(0) != expected) throw nb::value_error((std::string(name) + " has the wrong length").c_str());
  return array.data();
}

template <class T>
const T* column(const std::optional<Input<T>>& array, std::size_t expected, const char* name) {
  return array ? column(*array, expected, name) : nullptr;
}

// A column of what each request can be served. The values have been checked by caudex.cache.BlockTrace; this guards
// memory only.
const std::int64_t* reusable_column(const BlockPaths& log, const Integers& reusable) {
  const std::int64_t* values = column(reusable, log.num_requests(), "reusable");
  for (std::uint32_t i = 0; i < log.num_requests(); ++i) {
    if (values[i] < 0 || values[i] > log.paths[i].length || values[i] + 1 < log.paths[i].length) {
      throw nb::value_error("reusable blocks are all full blocks of a request, or all but one");
    }
  }
  return values;
}

// ----------------------------------------------------------------------------------------------- building a log

// A log that grows by batches, and the paths of its requests.
template <class Symbol, class Symbols>
struct PathBuilder {
  offline::PathTreeBuilder<Symbol, Symbols> tree;
  std::vector<offline::Path> paths;

  // Request i of the batch is the first lengths[i] of values[offsets[i] .. offsets[i + 1]), from root roots[i].
  Output add(const Input<Symbol>& values, const Integers& offsets, const Integers& lengths, const Integers& roots) {
    const std::size_t count = lengths.shape(0);
    const std::int64_t* starts = column(offsets, count + 1, "offsets");
    const std::int64_t* root = column(roots, count, "roots");
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t length = lengths.data()[i];
      const bool fits = starts[i] >= 0 && length >= 0 && length <= starts[i + 1] - starts[i] &&
                        starts[i + 1] <= static_cast<std::int64_t>(values.shape(0));
      if (!fits || root[i] < 0 || root[i] > INT32_MAX) throw nb::value_error("a request's values do not fit its offsets");
    }
    if (paths.size() + count >= UINT32_MAX) throw nb::value_error("a log of more than 4 billion requests");
    std::vector<std::int64_t> known(count);
    {
      nb::gil_scoped_release release;
      for (std::size_t i = 0; i < count; ++i) {
        const auto added = tree.add(values.data() + starts[i], static_cast<std::size_t>(lengths.data()[i]),
                                    static_cast<std::uint32_t>(root[i]), static_cast<std::uint32_t>(paths.size()));
        paths.push_back(added.path);
        known[i] = added.known;
      }
    }
    return to_numpy(std::move(known));
  }

  BlockPaths build(std::uint32_t factor) const {
    if (factor == 0) throw nb::value_error("factor must be at least 1");
    nb::gil_scoped_release release;
    return offline::coarsened(tree.tree(), paths, factor);
  }

  std::size_t bytes() const { return tree.bytes() + paths.capacity() * sizeof(offline::Path); }
};

template <class Symbol, class Symbols>
void bind_builder(nb::module_& m, const char* name) {
  using Builder = PathBuilder<Symbol, Symbols>;
  nb::class_<Builder>(m, name)
      .def(nb::init<>())
      .def("add", &Builder::add, "values"_a, "offsets"_a, "lengths"_a, "roots"_a)
      .def("build", &Builder::build, "factor"_a)
      .def_prop_ro("num_distinct", [](const Builder& builder) { return builder.tree.tree().num_blocks(); })
      .def_prop_ro("bytes", &Builder::bytes);
}

void add_ids(offline::DistinctIds& ids, const Input<std::int64_t>& values, const Integers& offsets) {
  const std::int64_t* bounds = offsets.data();
  for (std::size_t i = 0; i + 1 < offsets.shape(0); ++i) {
    if (bounds[i] < 0 || bounds[i] > bounds[i + 1] || bounds[i + 1] > static_cast<std::int64_t>(values.shape(0))) {
      throw nb::value_error("a request's values do not fit its offsets");
    }
  }
  nb::gil_scoped_release release;
  for (std::size_t i = 0; i + 1 < offsets.shape(0); ++i) {
    ids.add(values.data() + bounds[i], static_cast<std::size_t>(bounds[i + 1] - bounds[i]));
  }
}

void bind_distinct_ids(nb::module_& m) {
  nb::class_<offline::DistinctIds>(m, "DistinctIds")
      .def(nb::init<>())
      .def("add", &add_ids, "values"_a, "offsets"_a)
      .def_prop_ro("num_blocks", &offline::DistinctIds::num_blocks)
      .def_prop_ro("num_ids", &offline::DistinctIds::num_ids);
}

// ----------------------------------------------------------------------------------------------- asking a log

Output lengths(const BlockPaths& log) {
  std::vector<std::int64_t> lengths;
  lengths.reserve(log.paths.size());
  for (const offline::Path& path : log.paths) lengths.push_back(path.length);
  return to_numpy(std::move(lengths));
}

// The blocks of all requests one after another.
Output block_ids(const BlockPaths& log) {
  std::vector<std::int64_t> ids;
  std::vector<offline::Stretch> path;
  for (const offline::Path& of_request : log.paths) {
    log.tree.stretches(of_request, path);
    for (const offline::Stretch& stretch : path) {
      for (std::uint32_t k = 0; k < stretch.length; ++k) ids.push_back(std::int64_t{stretch.begin} + k);
    }
  }
  return to_numpy(std::move(ids));
}

// The block of each request that lies at that depth of its path, -1 where the path is shorter.
Output blocks_at(const BlockPaths& log, const Integers& depths) {
  const std::int64_t* depth = column(depths, log.num_requests(), "depths");
  std::vector<std::int64_t> blocks(log.num_requests(), -1);
  for (std::uint32_t i = 0; i < log.num_requests(); ++i) {
    if (depth[i] < 0 || depth[i] >= log.paths[i].length) continue;
    const offline::Path path = log.tree.cut(log.paths[i], static_cast<std::uint32_t>(depth[i]) + 1);
    blocks[i] = std::int64_t{log.tree[path.branch].begin} + depth[i] - log.tree[path.branch].depth;
  }
  return to_numpy(std::move(blocks));
}

BlockPaths select(const BlockPaths& log, const Integers& requests) {
  BlockPaths chosen{log.tree, {}};
  for (std::size_t k = 0; k < requests.shape(0); ++k) {
    const std::int64_t i = requests.data()[k];
    if (i < 0 || i >= log.num_requests()) throw nb::index_error("a request that the log does not have");
    chosen.paths.push_back(log.paths[static_cast<std::size_t>(i)]);
  }
  return chosen;
}

Output reuse_within(const BlockPaths& log, const Integers& labels) {
  const std::int64_t* label = column(labels, log.num_requests(), "labels");
  std::vector<std::int64_t> known;
  {
    nb::gil_scoped_release release;
    known = offline::reuse_within(log, label);
  }
  return to_numpy(std::move(known));
}

nb::tuple shared_runs(const BlockPaths& log, std::int64_t least_weight) {
  offline::SharedRuns runs;
  {
    nb::gil_scoped_release release;
    runs = offline::shared_runs(log, least_weight);
  }
  return nb::make_tuple(to_numpy(std::move(runs.parents)), to_numpy(std::move(runs.starts)), to_numpy(std::move(runs.ends)),
                        to_numpy(std::move(runs.requests)), to_numpy(std::move(runs.weights)),
                        to_numpy(std::move(runs.samples)));
}

nb::list hit_curves(const BlockPaths& log, const Integers& reusable, const std::optional<Input<std::int32_t>>& groups,
                    std::size_t num_groups) {
  const std::int64_t* wanted = reusable_column(log, reusable);
  const std::int32_t* group = column(groups, log.num_requests(), "groups");
  for (std::uint32_t i = 0; i < log.num_requests(); ++i) {
    const std::int64_t number = group == nullptr ? 0 : group[i];
    if (number < 0 || number >= static_cast<std::int64_t>(num_groups)) throw nb::value_error("a group that does not exist");
  }
  std::vector<offline::Knots> curves;
  {
    nb::gil_scoped_release release;
    curves = offline::hit_curves(log, wanted, group, num_groups);
  }
  nb::list arrays;
  for (offline::Knots& knots : curves) {
    arrays.append(nb::make_tuple(to_numpy(std::move(knots.capacities)), to_numpy(std::move(knots.hits))));
  }
  return arrays;
}

nb::list clairvoyant_hits(const BlockPaths& log, const Integers& reusable, const std::vector<std::int64_t>& capacities) {
  const std::int64_t* wanted = reusable_column(log, reusable);
  std::vector<std::vector<std::int64_t>> hits;
  {
    nb::gil_scoped_release release;
    const offline::NextUses uses(log, wanted);
    for (const std::int64_t capacity : capacities) hits.push_back(offline::clairvoyant_hits(uses, capacity));
  }
  nb::list arrays;
  for (auto& values : hits) arrays.append(to_numpy(std::move(values)));
  return arrays;
}

void bind_paths(nb::module_& m) {
  nb::class_<BlockPaths>(m, "BlockPaths")
      .def("__len__", &BlockPaths::num_requests)
      .def_prop_ro("num_distinct", [](const BlockPaths& log) { return log.tree.num_blocks(); })
      .def("lengths", &lengths)
      .def("block_ids", &block_ids)
      .def("blocks_at", &blocks_at, "depths"_a)
      .def("select", &select, "requests"_a)
      .def("reuse_within", &reuse_within, "labels"_a)
      .def("blocks_in_flight",
           [](const BlockPaths& log, const Input<double>& arrivals, const Input<double>& done, const Integers& served) {
             const std::size_t count = log.num_requests();
             return offline::blocks_in_flight(log, column(arrivals, count, "arrivals"), column(done, count, "done"),
                                              column(served, count, "served"));
           }, "arrivals"_a, "done"_a, "served"_a)
      .def("shared_runs", &shared_runs, "least_weight"_a)
      .def("hit_curves", &hit_curves, "reusable"_a, "groups"_a.none(), "num_groups"_a)
      .def("clairvoyant_hits", &clairvoyant_hits, "reusable"_a, "capacities"_a);
}

// ----------------------------------------------------------------------------------------------- replays

// The columns of a log that a replay looks at, and the arrays that they lie in.
struct Columns {
  std::optional<Input<double>> times;
  std::optional<Integers> tenants, sessions;
  std::optional<Input<double>> expected_returns;
  std::optional<Input<bool>> session_ends;
  std::optional<Input<double>> priorities;

  offline::RequestColumns view(std::size_t num_requests) const {
    return {column(times, num_requests, "times"),
            column(tenants, num_requests, "tenants"),
            column(sessions, num_requests, "sessions"),
            column(expected_returns, num_requests, "expected_returns"),
            column(session_ends, num_requests, "session_ends"),
            column(priorities, num_requests, "priorities")};
  }
};

// Takes the GIL for the call, and a signal that has come in meanwhile (Ctrl-C) stops the replay.
offline::Progress to_progress(nb::object callback) {
  return [callback](std::int64_t done) {
    nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (!callback.is_none()) callback(done);
  };
}

nb::tuple run(offline::RequestSource& source, const Columns& columns, const CacheOptions& options, nb::object progress) {
  const offline::RequestColumns view = columns.view(static_cast<std::size_t>(source.num_requests()));
  const offline::Progress report = to_progress(progress);
  offline::ReplayResult result;
  {
    nb::gil_scoped_release release;
    result = offline::replay(source, view, options, report);
  }
  return nb::make_tuple(to_numpy(std::move(result.hit_tokens)), result.stats, result.num_cached_blocks);
}

nb::tuple replay_tokens(const Input<Token>& tokens, const Integers& offsets, const Integers& prompt_lengths,
                        const Columns& columns, std::int64_t num_blocks, std::int64_t block_size,
                        const std::string& index, nb::handle policy, const std::string& sharing, std::int64_t k,
                        nb::object progress) {
  const std::size_t num_requests = prompt_lengths.shape(0);
  offline::TokenLog log(tokens.data(), column(offsets, num_requests + 1, "offsets"), prompt_lengths.data(),
                        static_cast<std::int64_t>(num_requests));
  return run(log, columns, make_options(num_blocks, block_size, index, policy, "fold64", 0, {}, sharing, k, {}), progress);
}

nb::tuple replay_blocks(const BlockPaths& paths, const Integers& reusable, const std::optional<Integers>& unseen_output,
                        const Columns& columns, std::int64_t num_blocks, std::int64_t tokens_per_block,
                        const std::string& index, nb::handle policy, const std::string& sharing, std::int64_t k,
                        nb::object progress) {
  if (paths.tree.num_blocks() > INT32_MAX) throw nb::value_error("a log of more than 2 billion distinct blocks");
  offline::BlockLog log(paths, reusable_column(paths, reusable),
                        column(unseen_output, paths.num_requests(), "unseen_output"));
  CacheOptions options = make_options(num_blocks, 1, index, policy, "fold64", 0, {}, sharing, k, {});
  offline::set_for_blocks(options, tokens_per_block);
  return run(log, columns, options, progress);
}

void bind_replays(nb::module_& m) {
  nb::class_<Columns>(m, "ReplayColumns")
      .def(nb::init<std::optional<Input<double>>, std::optional<Integers>, std::optional<Integers>,
                    std::optional<Input<double>>, std::optional<Input<bool>>, std::optional<Input<double>>>(),
           "times"_a.none(), "tenants"_a.none(), "sessions"_a.none(), "expected_returns"_a.none(),
           "session_ends"_a.none(), "priorities"_a.none());
  m.def("replay_tokens", &replay_tokens, "tokens"_a, "offsets"_a, "prompt_lengths"_a, "columns"_a, "num_blocks"_a,
        "block_size"_a, "index"_a, "policy"_a, "sharing"_a, "k"_a, "progress"_a.none());
  m.def("replay_blocks", &replay_blocks, "paths"_a, "reusable"_a, "unseen_output"_a.none(), "columns"_a, "num_blocks"_a,
        "tokens_per_block"_a, "index"_a, "policy"_a, "sharing"_a, "k"_a, "progress"_a.none());
}

}  // namespace

void bind_offline(nb::module_& m) {
  bind_builder<Token, offline::TokenCodes>(m, "TokenPathBuilder");
  bind_builder<std::int64_t, offline::WholeSymbols<std::int64_t>>(m, "BlockPathBuilder");
  bind_distinct_ids(m);
  bind_paths(m);
  bind_replays(m);
}

}  // namespace caudex
