#include "prompt.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "cache_options.hpp"

namespace nb = nanobind;

namespace caudex {

PromptArgument::PromptArgument(nb::handle tokens, const std::string& space, const std::string& tenant, nb::handle content)
    : ids_(tokens) {
  prompt_.tokens = ids_.data();
  prompt_.count = ids_.size();
  prompt_.space = space;
  prompt_.tenant = tenant;
  if (content.is_none()) return;
  for (nb::handle item : content) {
    auto [start, end, key] = nb::cast<std::tuple<std::int64_t, std::int64_t, nb::bytes>>(item);
    const auto limit = static_cast<std::int64_t>(prompt_.count);
    prompt_.content.push_back({to_option(start, "the start of content", 0, limit),
                               to_option(end, "the end of content", 0, limit),
                               std::string(key.c_str(), key.size())});
  }
}

}  // namespace caudex
