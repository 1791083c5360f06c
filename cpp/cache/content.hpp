// Content that is not text: images and the like, told apart by their hash.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "cache/types.hpp"

namespace caudex {

// The tokens [start, end) of a prompt are placeholders for the content with this key.
struct ContentRange {
  Position start = 0;
  Position end = 0;
  std::string key;
};

// Gives every content two token values of its own, all negative: one for the first of its tokens, one for the others, so
// that neighbouring pieces cannot run together. They take the place of the placeholders in the tree, so the same
// placeholders with another image never match. The values come from a hash of the key, so they are the same in every
// process; where two keys meet on one value the later key takes the next, so within a process they are exact.
class ContentBook {
 public:
  // Replaces the placeholders, and remembers the keys.
  void write(const std::vector<ContentRange>& ranges, std::vector<Token>& tokens);
  // The same for a look-up: content that was never seen gets a value that matches nothing.
  void read(const std::vector<ContentRange>& ranges, std::vector<Token>& tokens) const;

  static constexpr std::uint32_t kNumCodes = (1u << 30) - 1;

  std::size_t size() const { return codes_.size(); }
  const std::unordered_map<std::uint32_t, std::string>& keys() const { return keys_; }
  // Takes over a key with the code it had elsewhere.
  void insert(std::uint32_t code, const std::string& key) {
    codes_[key] = code;
    keys_[code] = key;
  }
  // Forgets all content but that whose tokens are in `live`.
  void keep_only(const std::unordered_set<std::uint32_t>& live_codes);
  static std::uint32_t code_of(Token token) { return static_cast<std::uint32_t>(-(token + 2)) / 2; }

 private:
  static void fill(const ContentRange& range, Token first, Token other, std::vector<Token>& tokens);
  std::uint32_t code_for(const std::string& key);

  std::unordered_map<std::string, std::uint32_t> codes_;
  std::unordered_map<std::uint32_t, std::string> keys_;
};

// Throws std::invalid_argument unless the ranges are in order, apart from each other, and within the prompt.
void require_valid(const std::vector<ContentRange>& ranges, std::size_t num_tokens);

}  // namespace caudex
