#include "cache/offline/block_trace.hpp"
#include "cache/offline/clairvoyant.hpp"
#include "cache/offline/hit_curve.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
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
