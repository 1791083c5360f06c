// Guesses about a text from the text itself.
#include "lookup/token_history.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "tokens.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace caudex {
namespace {

nb::tuple continuation(const TokenHistory& history, std::int64_t shortest, std::int64_t longest, std::int64_t limit) {
  const auto least = static_cast<std::int64_t>(TokenHistory::kShortest);
  if (shortest < least || longest < shortest || limit < 0) {
    throw std::invalid_argument("a match is of " + std::to_string(least) + " tokens or more and a limit not negative, got " +
                                std::to_string(shortest) + " to " + std::to_string(longest) + " tokens and the limit " +
                                std::to_string(limit));
  }
  const Continuation found = history.continuation(shortest, longest, limit);
  return nb::make_tuple(found.num_matched, nb::cast(found.tokens));
}

}  // namespace

void bind_lookup(nb::module_& m) {
  nb::class_<TokenHistory>(m, "TokenHistory", "A text's tokens, and how it went on where it last read as it ends now.")
      .def(nb::init<>())
      .def("__len__", &TokenHistory::size)
      .def("append",
           [](TokenHistory& self, nb::object tokens) {
             TokenArgument ids(tokens);
             self.append(ids.data(), ids.size());
           },
           "tokens"_a)
      .def("continuation", &continuation, "shortest"_a, "longest"_a, "limit"_a,
           "Looks for the text's last `longest` tokens, or as many of them as can be found but at least `shortest`, at an "
           "earlier place; of equally good places it takes the latest.\n\n"
           "Returns how many matched (0 if none do) and the up to `limit` tokens that followed them there.");
}

}  // namespace caudex
