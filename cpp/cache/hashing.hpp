// Keys of blocks: each is a hash of its parent's key and its own tokens, so it stands for the whole prefix.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cache/types.hpp"

namespace caudex {

inline constexpr std::uint32_t kMaxKeyBytes = 32;

// A chained block hash. key(root) = H(secret, namespace); key(block) = H(secret, key(parent), tokens).
//
// With a random secret, keys mean nothing outside this process and nobody can prepare a collision. With the secret 0
// they are stable: another process computes the same ones.
class BlockHasher {
 public:
  virtual ~BlockHasher() = default;
  virtual std::uint32_t key_bytes() const = 0;
  // Writes key_bytes() bytes at `key`, which may be `parent`.
  virtual void chain(const std::uint8_t* parent, const Token* tokens, std::uint32_t count, std::uint8_t* key) const = 0;
  virtual void root(std::string_view space, std::uint8_t* key) const = 0;
};

// Throws std::invalid_argument that lists the known names.
std::unique_ptr<BlockHasher> make_hasher(const std::string& algorithm, std::uint64_t secret);
std::vector<std::string> hasher_names();

// 64 bits from the operating system.
std::uint64_t random_secret();

}  // namespace caudex
