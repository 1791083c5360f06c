#include "cache/offline/block_trace.hpp"
#include "cache/offline/clairvoyant.hpp"
#include "cache/offline/hit_curve.hpp"
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

template <class T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

Output to_numpy(std::vector<std::int64_t>&& values) {
  auto* owned = new std::vector<std::int64_t>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<std::int64_t>*>(p); });
  return Output(owned->data(), {owned->size()}, owner);
}

// The arrays have been checked by caudex.cache.BlockTrace; this guards memory only.
offline::BlockTrace view(const Input<std::int64_t>& ids, const Input<std::int64_t>& offsets,
                         const Input<std::int64_t>& input_lengths, std::int64_t block_size) {
  const auto num_requests = static_cast<std::int64_t>(input_lengths.shape(0));
  if (static_cast<std::int64_t>(offsets.shape(0)) != num_requests + 1) {
    throw nb::value_error("offsets must have one entry more than input_lengths");
  }
  if (block_size < 1) throw nb::value_error("block_size must be at least 1");
  return {ids.data(), offsets.data(), input_lengths.data(), num_requests, block_size};
}

template <class T>
const T* data_or_null(const std::optional<Input<T>>& column, std::size_t expected, const char* name) {
  if (!column) return nullptr;
  if (column->shape(0) != expected) throw nb::value_error((std::string(name) + " has the wrong length").c_str());
  return column->data();
}

// Takes the GIL for the call, and a signal that has come in meanwhile (Ctrl-C) stops the replay.
offline::Progress to_progress(nb::object callback) {
  return [callback](std::int64_t done) {
    nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (!callback.is_none()) callback(done);
  };
}

nb::tuple replay(const Input<Token>& tokens, const Input<std::int64_t>& offsets,
                 const Input<std::int64_t>& prompt_lengths, const std::optional<Input<std::int64_t>>& hit_limits,
                 const Input<std::int64_t>& kept_lengths, const Input<double>& times, const std::optional<Input<std::int64_t>>& unseen_output,
                 const std::optional<Input<std::int64_t>>& tenants, std::int64_t num_blocks, std::int64_t block_size,
                 const std::string& index, nb::handle policy, const std::string& sharing, std::int64_t k,
                 double tokens_per_id, nb::object progress) {
  CacheOptions options = make_options(num_blocks, block_size, index, policy, "fold64", 0, {}, sharing, k, {});
  options.tokens_per_id = tokens_per_id;
  const std::size_t num_requests = prompt_lengths.shape(0);
  if (offsets.shape(0) != num_requests + 1 || kept_lengths.shape(0) != num_requests || times.shape(0) != num_requests) {
    throw nb::value_error("the columns of the trace differ in length");
  }
  const offline::TokenTrace trace{tokens.data(),
                                  offsets.data(),
                                  prompt_lengths.data(),
                                  data_or_null(hit_limits, num_requests, "hit_limits"),
                                  kept_lengths.data(),
                                  times.data(),
                                  data_or_null(unseen_output, num_requests, "unseen_output"),
                                  data_or_null(tenants, num_requests, "tenants"),
                                  nullptr,
                                  static_cast<std::int64_t>(num_requests)};
  const offline::Progress report = to_progress(progress);
  offline::ReplayResult result;
  {
    nb::gil_scoped_release release;
    result = offline::replay(trace, options, report);
  }
  return nb::make_tuple(to_numpy(std::move(result.hit_tokens)), result.stats, result.num_cached_blocks);
}

nb::tuple knots(offline::HitCurve& curve, std::size_t group) {
  offline::Knots knots;
  {
    nb::gil_scoped_release release;
    knots = curve.knots(group);
  }
  return nb::make_tuple(to_numpy(std::move(knots.capacities)), to_numpy(std::move(knots.hits)));
}

}  // namespace

void bind_offline(nb::module_& m) {
  nb::class_<offline::HitCurve>(m, "HitCurve")
      .def(nb::init<std::size_t>(), "num_groups"_a)
      .def(
          "add",
          [](offline::HitCurve& curve, const Input<std::int64_t>& ids, const Input<std::int64_t>& offsets,
             const Input<std::int64_t>& input_lengths, std::int64_t block_size, const Input<std::int32_t>& groups) {
            const offline::BlockTrace trace = view(ids, offsets, input_lengths, block_size);
            if (groups.shape(0) != input_lengths.shape(0)) throw nb::value_error("groups must have one entry a request");
            nb::gil_scoped_release release;
            curve.add(trace, groups.data());
          },
          "ids"_a, "offsets"_a, "input_lengths"_a, "block_size"_a, "groups"_a)
      .def("knots", &knots, "group"_a)
      .def_prop_ro("num_distinct_blocks", &offline::HitCurve::num_distinct_blocks);

  m.def("replay", &replay, "tokens"_a, "offsets"_a, "prompt_lengths"_a, "hit_limits"_a.none(), "kept_lengths"_a, "times"_a,
        "unseen_output"_a.none(), "tenants"_a.none(), "num_blocks"_a, "block_size"_a, "index"_a, "policy"_a,
        "sharing"_a, "k"_a, "tokens_per_id"_a, "progress"_a.none());

  m.def(
      "clairvoyant_hits",
      [](const Input<std::int64_t>& ids, const Input<std::int64_t>& offsets, const Input<std::int64_t>& input_lengths,
         std::int64_t block_size, const std::vector<std::int64_t>& capacities) {
        const offline::BlockTrace trace = view(ids, offsets, input_lengths, block_size);
        std::vector<std::vector<std::int64_t>> hits;
        {
          nb::gil_scoped_release release;
          const offline::NextUses uses(trace);
          for (const std::int64_t capacity : capacities) hits.push_back(offline::clairvoyant_hits(uses, capacity));
        }
        nb::list arrays;
        for (auto& values : hits) arrays.append(to_numpy(std::move(values)));
        return arrays;
      },
      "ids"_a, "offsets"_a, "input_lengths"_a, "block_size"_a, "capacities"_a);
}

}  // namespace caudex
