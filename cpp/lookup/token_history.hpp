// A text that grows, and how it went on where it last read as it ends now.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace caudex {

// How many of the text's last tokens stood at an earlier place too, and what followed them there.
struct Continuation {
  std::size_t num_matched = 0;
  std::vector<std::int32_t> tokens;
};

// The tokens of one request.
//
//     tokens   ... a b c X Y Z ... a b c
//                                  |---|  the end: at least `shortest`, at most `longest` tokens
//                  |---|                  the latest of the earlier places that match the most of it
//                        |-- ...          the continuation
//
// A search reads all tokens once, backwards, and as many more as match: 4 bytes a token, at the speed of memory. An
// index of n-grams would take several times the memory and be no quicker beside attention, which reads kilobytes for
// every token at every step.
class TokenHistory {
 public:
  static constexpr std::size_t kShortest = 2;  // The search compares tokens in pairs.

  void append(const std::int32_t* tokens, std::size_t count);
  std::size_t size() const { return tokens_.size(); }

  // Up to `limit` tokens; none if nothing matches. Where the earlier place and the end overlap, the text repeats itself
  // and the continuation goes on repeating it. The caller guarantees kShortest <= shortest <= longest.
  Continuation continuation(std::size_t shortest, std::size_t longest, std::size_t limit) const;

 private:
  std::size_t last_pair_before(std::size_t end) const;
  std::size_t num_matching(std::size_t end, std::size_t longest) const;

  std::vector<std::int32_t> tokens_;
};

}  // namespace caudex
