#include "routing/chain_keys.hpp"

#include <cstring>

namespace caudex::routing {
namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9ULL;
constexpr std::size_t kNumLanes = 4;
constexpr std::size_t kStripeBytes = kNumLanes * sizeof(std::uint64_t);

std::uint64_t rotate_left(std::uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

std::uint64_t absorb(std::uint64_t lane, std::uint64_t word) {
  return rotate_left(lane + word * kPrime2, 31) * kPrime1;
}

std::uint64_t avalanche(std::uint64_t x) {
  x = (x ^ (x >> 33)) * kPrime2;
  x = (x ^ (x >> 29)) * kPrime3;
  return x ^ (x >> 32);
}

/// Four independent lanes over 32-byte stripes (the shape of XXH64), so the multiplies of one stripe overlap.
std::uint64_t hash_bytes(std::uint64_t seed, const unsigned char* data, std::size_t num_bytes) {
  std::uint64_t lanes[kNumLanes] = {seed + kPrime1, seed ^ kPrime2, seed + kPrime3, seed - kPrime1};
  std::size_t offset = 0;
  for (; offset + kStripeBytes <= num_bytes; offset += kStripeBytes) {
    std::uint64_t words[kNumLanes];
    std::memcpy(words, data + offset, kStripeBytes);
    for (std::size_t i = 0; i < kNumLanes; ++i) lanes[i] = absorb(lanes[i], words[i]);
  }
  if (offset < num_bytes) {
    std::uint64_t words[kNumLanes] = {};
    std::memcpy(words, data + offset, num_bytes - offset);
    for (std::size_t i = 0; i < kNumLanes; ++i) lanes[i] = absorb(lanes[i], words[i]);
  }
  std::uint64_t sum = num_bytes * kPrime3;
  for (std::size_t i = 0; i < kNumLanes; ++i) sum = rotate_left(sum ^ lanes[i], 27) * kPrime1 + kPrime3;
  return avalanche(sum);
}

}  // namespace

Key root_key(const void* name, std::size_t num_bytes) {
  return hash_bytes(kPrime3, static_cast<const unsigned char*>(name), num_bytes);
}

void chain_bytes(Key root, const void* data, std::size_t num_bytes, std::size_t chunk_bytes, Key* out) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  Key key = root;
  for (std::size_t i = 0; i < num_bytes / chunk_bytes; ++i) {
    key = hash_bytes(key, bytes + i * chunk_bytes, chunk_bytes);
    out[i] = key;
  }
}

}  // namespace caudex::routing
