#include "routing/chain_keys.hpp"

#include <cstring>
#include <initializer_list>

namespace caudex::routing {
namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9ULL;
constexpr std::size_t kStripeBytes = 32;

std::uint64_t rotate_left(std::uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

std::uint64_t absorb(std::uint64_t lane, std::uint64_t word) {
  return rotate_left(lane + word * kPrime2, 31) * kPrime1;
}

std::uint64_t avalanche(std::uint64_t x) {
  x = (x ^ (x >> 33)) * kPrime2;
  x = (x ^ (x >> 29)) * kPrime3;
  return x ^ (x >> 32);
}

std::uint64_t load(const unsigned char* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

/// Four independent lanes over 32-byte stripes (the shape of XXH64), so the multiplies of one stripe overlap.
struct Lanes {
  std::uint64_t a, b, c, d;

  explicit Lanes(std::uint64_t seed) : a(seed + kPrime1), b(seed ^ kPrime2), c(seed + kPrime3), d(seed - kPrime1) {}

  void absorb_stripe(const unsigned char* data) {
    a = absorb(a, load(data));
    b = absorb(b, load(data + 8));
    c = absorb(c, load(data + 16));
    d = absorb(d, load(data + 24));
  }

  std::uint64_t sum(std::size_t num_bytes) const {
    std::uint64_t sum = num_bytes * kPrime3;
    for (const std::uint64_t lane : {a, b, c, d}) sum = rotate_left(sum ^ lane, 27) * kPrime1 + kPrime3;
    return avalanche(sum);
  }
};

std::uint64_t hash_bytes(std::uint64_t seed, const unsigned char* data, std::size_t num_bytes) {
  Lanes lanes(seed);
  std::size_t offset = 0;
  for (; offset + kStripeBytes <= num_bytes; offset += kStripeBytes) lanes.absorb_stripe(data + offset);
  if (offset < num_bytes) {
    unsigned char last[kStripeBytes] = {};
    std::memcpy(last, data + offset, num_bytes - offset);
    lanes.absorb_stripe(last);
  }
  return lanes.sum(num_bytes);
}

/// The key of a chunk from that of what precedes it and the chunk's hash. Not symmetric: their order counts.
std::uint64_t link(std::uint64_t previous, std::uint64_t chunk_hash) {
  return avalanche(rotate_left(previous * kPrime1, 31) ^ chunk_hash);
}

}  // namespace

Key root_key(const void* name, std::size_t num_bytes) {
  return hash_bytes(kPrime3, static_cast<const unsigned char*>(name), num_bytes);
}

void chain_bytes(Key root, const void* data, std::size_t num_bytes, std::size_t chunk_bytes, Key* out) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  Key key = root;
  for (std::size_t i = 0; i < num_bytes / chunk_bytes; ++i) {
    // A chunk's hash does not wait for the chunk before it, so the processor overlaps them; only the link is serial.
    key = link(key, hash_bytes(kPrime3, bytes + i * chunk_bytes, chunk_bytes));
    out[i] = key;
  }
}

}  // namespace caudex::routing
