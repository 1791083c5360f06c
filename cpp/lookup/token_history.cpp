#include "lookup/token_history.hpp"

namespace caudex {
namespace {

constexpr std::size_t kRun = 64;  // Pairs compared before the first look at whether one of them matched.

}  // namespace

void TokenHistory::append(const std::int32_t* tokens, std::size_t count) {
  tokens_.insert(tokens_.end(), tokens, tokens + count);
}

Continuation TokenHistory::continuation(std::size_t shortest, std::size_t longest, std::size_t limit) const {
  Continuation found;
  std::size_t from = 0;
  if (tokens_.size() > shortest) {
    std::size_t end = last_pair_before(tokens_.size());
    for (; end != 0 && found.num_matched < longest; end = last_pair_before(end)) {
      const std::size_t matched = num_matching(end, longest);
      if (matched < shortest || matched <= found.num_matched) continue;
      found.num_matched = matched;
      from = end;
    }
  }
  if (found.num_matched == 0) return found;
  const std::size_t period = tokens_.size() - from;
  for (std::size_t i = 0; i < limit; ++i) {
    found.tokens.push_back(i < period ? tokens_[from + i] : found.tokens[i - period]);
  }
  return found;
}

// The end of the latest pair of tokens that equals the text's last pair and ends before `end`; 0 if there is none.
std::size_t TokenHistory::last_pair_before(std::size_t end) const {
  const std::int32_t* tokens = tokens_.data();
  const std::int32_t left = tokens[tokens_.size() - 2];
  const std::int32_t right = tokens[tokens_.size() - 1];
  for (; end > kRun + 2; end -= kRun) {
    const std::int32_t* run = tokens + end - kRun - 2;
    std::uint32_t matches = 0;
    for (std::size_t i = 0; i < kRun; ++i) matches += (run[i] == left) & (run[i + 1] == right);
    if (matches != 0) break;
  }
  for (; end > 2; --end) {
    if (tokens[end - 3] == left && tokens[end - 2] == right) return end - 1;
  }
  return 0;
}

// How many tokens before `end` equal the text's last ones.
std::size_t TokenHistory::num_matching(std::size_t end, std::size_t longest) const {
  std::size_t count = 0;
  while (count < longest && count < end && tokens_[end - 1 - count] == tokens_[tokens_.size() - 1 - count]) ++count;
  return count;
}

}  // namespace caudex
