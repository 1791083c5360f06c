// Block hashes outside of a cache.
#include "cache/hashing.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "cache_options.hpp"
#include "tokens.hpp"

namespace nb = nanobind;

namespace caudex {
namespace {

// The keys of a prompt's whole blocks, the first of which follows the block whose key is `parent`, if there is one.
nb::list block_keys(nb::handle tokens, std::int64_t block_size, const std::string& hash, const std::string& space,
                    std::uint64_t secret, const std::optional<nb::bytes>& parent) {
  TokenArgument ids(tokens);
  const std::uint32_t size = to_option(block_size, "block_size", 1, 1 << 16);
  const std::unique_ptr<BlockHasher> hasher = make_hasher(hash, secret);
  std::uint8_t key[kMaxKeyBytes];
  if (!parent.has_value()) {
    hasher->root(space, key);
  } else if (parent->size() == hasher->key_bytes()) {
    std::memcpy(key, parent->c_str(), parent->size());
  } else {
    throw std::invalid_argument("a key of " + hash + " has " + std::to_string(hasher->key_bytes()) +
                                " bytes; parent has " + std::to_string(parent->size()));
  }
  nb::list keys;
  for (std::size_t end = size; end <= ids.size(); end += size) {
    hasher->chain(key, ids.data() + end - size, size, key);
    keys.append(nb::bytes(reinterpret_cast<const char*>(key), hasher->key_bytes()));
  }
  return keys;
}

}  // namespace

void bind_hashing(nb::module_& m) {
  m.def("block_keys", &block_keys, nb::arg("tokens"), nb::arg("block_size") = 16, nb::kw_only(),
        nb::arg("hash") = "sha256", nb::arg("namespace") = "", nb::arg("secret") = 0, nb::arg("parent") = nb::none(),
        "The chained keys of a prompt's whole blocks, as a cache with this hash, namespace and secret has them; of a "
        "later part of it, with the key of the block before it as parent.");
  m.def("hasher_names", &hasher_names, "The block hashes that can be chosen by name.");
}

}  // namespace caudex
