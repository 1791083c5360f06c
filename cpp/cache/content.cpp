#include "cache/content.hpp"

#include <algorithm>

namespace caudex {
namespace {

constexpr Token kNeverSeen = -1;

// FNV-1a, folded: the same everywhere. It only has to spread; exactness comes from the book.
std::uint32_t spread(const std::string& key) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (unsigned char c : key) hash = (hash ^ c) * 0x100000001B3u;
  return static_cast<std::uint32_t>((hash ^ (hash >> 32)) % ContentBook::kNumCodes);
}

}  // namespace

void require_valid(const std::vector<ContentRange>& ranges, std::size_t num_tokens) {
  Position end = 0;
  for (const ContentRange& range : ranges) {
    if (range.start < end || range.end <= range.start || range.end > num_tokens) {
      throw std::invalid_argument("content [" + std::to_string(range.start) + ", " + std::to_string(range.end) +
                                  ") is empty, out of order, or outside a prompt of " + std::to_string(num_tokens) +
                                  " tokens");
    }
    end = range.end;
  }
}

void ContentBook::fill(const ContentRange& range, Token first, Token other, std::vector<Token>& tokens) {
  tokens[range.start] = first;
  std::fill(tokens.begin() + range.start + 1, tokens.begin() + range.end, other);
}

void ContentBook::write(const std::vector<ContentRange>& ranges, std::vector<Token>& tokens) {
  for (const ContentRange& range : ranges) {
    const Token first = -2 - 2 * static_cast<Token>(code_for(range.key));
    fill(range, first, first - 1, tokens);
  }
}

void ContentBook::read(const std::vector<ContentRange>& ranges, std::vector<Token>& tokens) const {
  for (const ContentRange& range : ranges) {
    auto found = codes_.find(range.key);
    if (found == codes_.end()) {
      fill(range, kNeverSeen, kNeverSeen, tokens);
    } else {
      const Token first = -2 - 2 * static_cast<Token>(found->second);
      fill(range, first, first - 1, tokens);
    }
  }
}

std::uint32_t ContentBook::code_for(const std::string& key) {
  auto found = codes_.find(key);
  if (found != codes_.end()) return found->second;
  std::uint32_t code = spread(key);
  while (keys_.count(code) != 0) code = (code + 1) % kNumCodes;
  codes_.emplace(key, code);
  keys_.emplace(code, key);
  return code;
}

void ContentBook::keep_only(const std::unordered_set<std::uint32_t>& live_codes) {
  for (auto item = keys_.begin(); item != keys_.end();) {
    if (live_codes.count(item->first) != 0) {
      ++item;
      continue;
    }
    codes_.erase(item->second);
    item = keys_.erase(item);
  }
}

}  // namespace caudex
