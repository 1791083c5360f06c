// Block hashes outside of a cache.
#include "cache/hashing.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>

#include "cache_options.hpp"
#include "tokens.hpp"

namespace nb = nanobind;

namespace caudex {
namespace {

// The keys of a prompt's whole blocks.
nb::list block_keys(nb::handle tokens, std::int64_t block_size, const std::string& hash, const std::string& space,
                    std::uint64_t secret) {
  TokenArgument ids(tokens);
  const std::uint32_t size = to_option(block_size, "block_size", 1, 1 << 16);
  const std::unique_ptr<BlockHasher> hasher = make_hasher(hash, secret);
  std::uint8_t key[kMaxKeyBytes];
  hasher->root(space, key);
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
        nb::arg("hash") = "sha256", nb::arg("namespace") = "", nb::arg("secret") = 0,
        "The chained keys of a prompt's whole blocks, as a cache with this hash, namespace and secret has them.");
  m.def("hasher_names", &hasher_names, "The block hashes that can be chosen by name.");
}

}  // namespace caudex
