#include "cache/digests.hpp"

#include <algorithm>
#include <cstring>

namespace caudex {
namespace {

std::uint32_t rotate_right(std::uint32_t value, int count) { return (value >> count) | (value << (32 - count)); }

constexpr std::uint32_t kInitial[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                       0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

// -------------------------------------------------------------------------------------------------------- SHA-256

constexpr std::uint32_t kRoundConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void sha256_block(std::uint32_t* state, const std::uint8_t* block) {
  std::uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = std::uint32_t{block[4 * i]} << 24 | std::uint32_t{block[4 * i + 1]} << 16 |
           std::uint32_t{block[4 * i + 2]} << 8 | block[4 * i + 3];
  }
  for (int i = 16; i < 64; ++i) {
    const std::uint32_t s0 = rotate_right(w[i - 15], 7) ^ rotate_right(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const std::uint32_t s1 = rotate_right(w[i - 2], 17) ^ rotate_right(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  std::uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
  std::uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
  for (int i = 0; i < 64; ++i) {
    const std::uint32_t s1 = rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25);
    const std::uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRoundConstants[i] + w[i];
    const std::uint32_t s0 = rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22);
    const std::uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const std::uint32_t added[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state[i] += added[i];
}

// --------------------------------------------------------------------------------------------------------- BLAKE3

constexpr std::size_t kBlockBytes = 64;
constexpr std::size_t kChunkBytes = 1024;
enum Flag : std::uint32_t { kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8 };

constexpr std::uint8_t kSchedule[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1}, {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4}, {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13}};

void mix(std::uint32_t* v, int a, int b, int c, int d, std::uint32_t x, std::uint32_t y) {
  v[a] += v[b] + x;
  v[d] = rotate_right(v[d] ^ v[a], 16);
  v[c] += v[d];
  v[b] = rotate_right(v[b] ^ v[c], 12);
  v[a] += v[b] + y;
  v[d] = rotate_right(v[d] ^ v[a], 8);
  v[c] += v[d];
  v[b] = rotate_right(v[b] ^ v[c], 7);
}

// One compression; the chaining value becomes the new one.
void compress(std::uint32_t* chaining, const std::uint8_t* block, std::size_t size, std::uint64_t counter,
              std::uint32_t flags) {
  std::uint8_t padded[kBlockBytes] = {};
  std::memcpy(padded, block, size);
  std::uint32_t m[16];
  for (int i = 0; i < 16; ++i) {
    m[i] = std::uint32_t{padded[4 * i]} | std::uint32_t{padded[4 * i + 1]} << 8 |
           std::uint32_t{padded[4 * i + 2]} << 16 | std::uint32_t{padded[4 * i + 3]} << 24;
  }
  std::uint32_t v[16];
  std::copy(chaining, chaining + 8, v);
  std::copy(kInitial, kInitial + 4, v + 8);
  v[12] = static_cast<std::uint32_t>(counter);
  v[13] = static_cast<std::uint32_t>(counter >> 32);
  v[14] = static_cast<std::uint32_t>(size);
  v[15] = flags;
  for (const std::uint8_t* s : kSchedule) {
    mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
    mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
    mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
    mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
    mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
    mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
    mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
    mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
  }
  for (int i = 0; i < 8; ++i) chaining[i] = v[i] ^ v[i + 8];
}

void store_words(const std::uint32_t* words, std::uint8_t* bytes) {
  for (int i = 0; i < 32; ++i) bytes[i] = static_cast<std::uint8_t>(words[i / 4] >> (8 * (i % 4)));
}

// The chaining value of the data from `chunk` on: a chunk, or a binary tree whose left half is the largest power of two.
void blake3_subtree(const std::uint8_t* data, std::size_t size, std::uint64_t chunk, std::uint32_t root,
                    std::uint32_t* chaining) {
  std::copy(kInitial, kInitial + 8, chaining);
  if (size <= kChunkBytes) {
    for (std::size_t at = 0; at == 0 || at < size; at += kBlockBytes) {
      const std::size_t count = std::min(kBlockBytes, size - at);
      const bool is_last = at + count == size;
      const std::uint32_t flags = (at == 0 ? kChunkStart : 0u) | (is_last ? kChunkEnd | root : 0u);
      compress(chaining, data + at, count, chunk, flags);
    }
    return;
  }
  std::size_t left = kChunkBytes;
  while (left * 2 < size) left *= 2;
  std::uint32_t children[16];
  blake3_subtree(data, left, chunk, 0, children);
  blake3_subtree(data + left, size - left, chunk + left / kChunkBytes, 0, children + 8);
  std::uint8_t block[kBlockBytes];
  store_words(children, block);
  store_words(children + 8, block + 32);
  compress(chaining, block, kBlockBytes, 0, kParent | root);
}

}  // namespace

void sha256(const std::uint8_t* data, std::size_t size, std::uint8_t* digest) {
  std::uint32_t state[8];
  std::copy(kInitial, kInitial + 8, state);
  std::size_t at = 0;
  for (; at + 64 <= size; at += 64) sha256_block(state, data + at);
  std::uint8_t last[128] = {};
  const std::size_t rest = size - at;
  if (rest > 0) std::memcpy(last, data + at, rest);
  last[rest] = 0x80;
  const std::size_t padded = rest < 56 ? 64 : 128;
  const std::uint64_t bits = std::uint64_t{size} * 8;
  for (int i = 0; i < 8; ++i) last[padded - 1 - i] = static_cast<std::uint8_t>(bits >> (8 * i));
  for (at = 0; at < padded; at += 64) sha256_block(state, last + at);
  for (int i = 0; i < 32; ++i) digest[i] = static_cast<std::uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
}

void blake3(const std::uint8_t* data, std::size_t size, std::uint8_t* digest) {
  std::uint32_t chaining[8];
  blake3_subtree(data, size, 0, kRoot, chaining);
  store_words(chaining, digest);
}

}  // namespace caudex
