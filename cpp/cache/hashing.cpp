#include "cache/hashing.hpp"

#include <cstring>
#include <random>

#include "cache/digests.hpp"

namespace caudex {
namespace {

std::uint64_t load64(const void* bytes) {
  std::uint64_t value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// The two halves of a 128-bit product, folded: the mixing step of the wyhash family.
std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

constexpr std::uint64_t kPi[4] = {0x243F6A8885A308D3u, 0x13198A2E03707344u, 0xA4093822299F31D0u, 0x082EFA98EC4E6C89u};

// A keyed multiply-fold hash of 64 or 128 bits: about a third of a nanosecond a token. Its strength is the secret; a
// collision costs a miss, since tokens are compared on every hit.
template <std::uint32_t kLanes>
class FoldHasher final : public BlockHasher {
 public:
  explicit FoldHasher(std::uint64_t secret) {
    for (std::uint32_t i = 0; i < 4; ++i) keys_[i] = fold(secret ^ kPi[i], kPi[(i + 1) % 4]) ^ kPi[i] ^ secret;
  }

  std::uint32_t key_bytes() const override { return 8 * kLanes; }

  void chain(const std::uint8_t* parent, const Token* tokens, std::uint32_t count, std::uint8_t* key) const override {
    mix(parent, reinterpret_cast<const std::uint8_t*>(tokens), count * sizeof(Token), key);
  }

  void root(std::string_view space, std::uint8_t* key) const override {
    const std::uint8_t nothing[8 * kLanes] = {};
    mix(nothing, reinterpret_cast<const std::uint8_t*>(space.data()), space.size(), key);
  }

 private:
  void mix(const std::uint8_t* parent, const std::uint8_t* bytes, std::size_t count, std::uint8_t* key) const {
    std::uint64_t lanes[kLanes];
    for (std::uint32_t l = 0; l < kLanes; ++l) lanes[l] = fold(load64(parent + 8 * l) ^ keys_[l], keys_[2] ^ count);
    std::size_t i = 0;
    for (; i + 16 <= count; i += 16) absorb(lanes, load64(bytes + i), load64(bytes + i + 8));
    if (i < count) {
      std::uint8_t rest[16] = {};
      std::memcpy(rest, bytes + i, count - i);
      absorb(lanes, load64(rest), load64(rest + 8));
    }
    for (std::uint32_t l = 0; l < kLanes; ++l) {
      std::uint64_t out = fold(lanes[l] ^ keys_[3], lanes[(l + 1) % kLanes] ^ keys_[l] ^ kPi[l]);
      std::memcpy(key + 8 * l, &out, 8);
    }
  }

  void absorb(std::uint64_t* lanes, std::uint64_t a, std::uint64_t b) const {
    for (std::uint32_t l = 0; l < kLanes; ++l) lanes[l] = fold(a ^ keys_[l] ^ lanes[l], b ^ keys_[l + 2]);
  }

  std::uint64_t keys_[4];
};

// key = digest(secret, parent's key, tokens), all little-endian: what another process can compute from the same tokens.
template <void (*digest)(const std::uint8_t*, std::size_t, std::uint8_t*)>
class DigestHasher final : public BlockHasher {
 public:
  explicit DigestHasher(std::uint64_t secret) {
    for (int i = 0; i < 8; ++i) secret_[i] = static_cast<std::uint8_t>(secret >> (8 * i));
  }

  std::uint32_t key_bytes() const override { return kDigestBytes; }

  void chain(const std::uint8_t* parent, const Token* tokens, std::uint32_t count, std::uint8_t* key) const override {
    hash(parent, reinterpret_cast<const std::uint8_t*>(tokens), count * sizeof(Token), key);
  }

  void root(std::string_view space, std::uint8_t* key) const override {
    const std::uint8_t nothing[kDigestBytes] = {};
    hash(nothing, reinterpret_cast<const std::uint8_t*>(space.data()), space.size(), key);
  }

 private:
  void hash(const std::uint8_t* parent, const std::uint8_t* bytes, std::size_t count, std::uint8_t* key) const {
    std::vector<std::uint8_t> message(sizeof secret_ + kDigestBytes + count);
    std::memcpy(message.data(), secret_, sizeof secret_);
    std::memcpy(message.data() + sizeof secret_, parent, kDigestBytes);
    if (count > 0) std::memcpy(message.data() + sizeof secret_ + kDigestBytes, bytes, count);
    digest(message.data(), message.size(), key);
  }

  std::uint8_t secret_[8];
};

template <typename Hasher>
std::unique_ptr<BlockHasher> make(std::uint64_t secret) {
  return std::make_unique<Hasher>(secret);
}

struct Algorithm {
  const char* name;
  std::unique_ptr<BlockHasher> (*make)(std::uint64_t secret);
};

constexpr Algorithm kAlgorithms[] = {
    {"fold64", make<FoldHasher<1>>},
    {"fold128", make<FoldHasher<2>>},
    {"blake3", make<DigestHasher<blake3>>},
    {"sha256", make<DigestHasher<sha256>>},
};

}  // namespace

std::unique_ptr<BlockHasher> make_hasher(const std::string& algorithm, std::uint64_t secret) {
  std::string known;
  for (const Algorithm& entry : kAlgorithms) {
    if (algorithm == entry.name) return entry.make(secret);
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw std::invalid_argument("unknown hash algorithm '" + algorithm + "': choose one of " + known);
}

std::vector<std::string> hasher_names() {
  std::vector<std::string> names;
  for (const Algorithm& entry : kAlgorithms) names.emplace_back(entry.name);
  return names;
}

std::uint64_t random_secret() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) | device();
}

}  // namespace caudex
