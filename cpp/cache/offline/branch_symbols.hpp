#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cache/offline/growing_array.hpp"
#include "cache/offline/path_tree.hpp"
#include "cache/types.hpp"

namespace caudex::offline {

// What the branches of a tree consist of, so that a path can be held against one. Two classes with one interface:
// append() the symbols of the next branch, its first(), and the common_prefix() of a branch and a path.

// Symbols as they are.
template <class Symbol>
class WholeSymbols {
 public:
  const Symbol& operator[](Block block) const { return *(symbols_ + block); }
  std::size_t bytes() const { return symbols_.bytes(); }

  void append(const Symbol* symbols, std::size_t count) {
    std::memcpy(symbols_.extend(count), symbols, count * sizeof(Symbol));
  }

  Symbol first(BranchId, Block begin) const { return (*this)[begin]; }

  // Of the `length` symbols at `path` and the `size` of the branch that begins at `begin`.
  std::size_t common_prefix(const Symbol* path, std::size_t length, BranchId, Block begin, std::size_t size) const {
    const Symbol* stored = symbols_ + begin;
    const std::size_t most = std::min(length, size);
    std::size_t i = 0;
    for (; i + 16 <= most; i += 16) {
      Symbol differ = 0;
      for (std::size_t j = i; j < i + 16; ++j) differ |= path[j] ^ stored[j];
      if (differ != 0) break;
    }
    while (i < most && path[i] == stored[i]) ++i;
    return i;
  }

 private:
  GrowingArray<Symbol> symbols_;
};

// The first outputs of SplitMix64 from 0: random multipliers.
constexpr std::array<std::uint64_t, 16> make_hash_keys() {
  std::array<std::uint64_t, 16> keys{};
  std::uint64_t state = 0;
  for (std::uint64_t& key : keys) {
    std::uint64_t x = state += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    key = x ^ (x >> 31);
  }
  return keys;
}
inline constexpr std::array<std::uint64_t, 16> kHashKeys = make_hash_keys();

// Tokens in 36 bytes for 16 of them, where 64 would hold them as they are: enough to tell whether a path goes on as a
// branch does, and where it leaves it.
//
//   a branch     | 16 tokens: a hash of 32 bits | 16 tokens: a hash | 3 tokens: a hash |
//                  c c c c c c c c c c c c c c c c ...                                    a code of 16 bits a token
//
// Chunks of equal hashes are taken for equal: two different ones have the same hash with probability 2^-32 (multilinear
// hashing: Lemire and Kaser, "Strongly universal string hashing is fast", 2014). In a chunk of another hash the first
// other code tells the token, exactly where ids are below 65,536; else the token after the true one is told with
// probability 2^-16.
class TokenCodes {
 public:
  std::size_t bytes() const { return codes_.bytes() + hashes_.bytes() + branches_.capacity() * sizeof(Begin); }

  void append(const Token* tokens, std::size_t count) {
    branches_.push_back({tokens[0], static_cast<std::uint32_t>(hashes_.size())});
    std::transform(tokens, tokens + count, codes_.extend(count), code);
    std::uint32_t* hash = hashes_.extend((count + kChunk - 1) / kChunk);
    for (std::size_t i = 0; i < count; i += kChunk) *hash++ = hash_of(tokens + i, std::min(kChunk, count - i));
  }

  Token first(BranchId branch, Block) const { return branches_[branch].first; }

  // As in WholeSymbols. The caller guarantees that both begin with the same token.
  std::size_t common_prefix(const Token* path, std::size_t length, BranchId branch, Block begin, std::size_t size) const {
    const std::uint32_t* hash = hashes_ + branches_[branch].chunk;
    for (std::size_t i = 0; i < std::min(length, size); i += kChunk) {
      const std::size_t chunk = std::min(kChunk, size - i);
      const bool whole = length - i >= chunk;
      if (whole && hash_of(path + i, chunk) == *hash++) continue;
      const std::size_t same = common_codes(path + i, codes_ + begin + i, std::min(chunk, length - i));
      return i + (whole && same == chunk ? same - 1 : same);
    }
    return std::min(length, size);
  }

 private:
  static constexpr std::size_t kChunk = kHashKeys.size();

  struct Begin {
    Token first;
    std::uint32_t chunk;  // the branch's first hash
  };

  static std::uint16_t code(Token token) {
    const auto id = static_cast<std::uint32_t>(token);
    return static_cast<std::uint16_t>(id ^ (((id >> 16) * 0x9E3779B1u) >> 16));
  }

  static std::size_t common_codes(const Token* path, const std::uint16_t* codes, std::size_t most) {
    std::size_t same = 0;
    while (same < most && code(path[same]) == codes[same]) ++same;
    return same;
  }

  static std::uint32_t hash_of(const Token* tokens, std::size_t count) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += kHashKeys[i] * static_cast<std::uint32_t>(tokens[i]);
    return static_cast<std::uint32_t>(sum >> 32);
  }

  GrowingArray<std::uint16_t> codes_;   // by token
  GrowingArray<std::uint32_t> hashes_;  // by chunk
  std::vector<Begin> branches_;
};

}  // namespace caudex::offline
