// A prompt as Python gives it.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "cache/prefix_cache.hpp"
#include "tokens.hpp"

namespace caudex {

// Tokens, and [(start, end, key), ...] for content that is not text. The names must outlive it.
class PromptArgument {
 public:
  PromptArgument(nanobind::handle tokens, const std::string& space, const std::string& tenant, nanobind::handle content);

  const Prompt& operator*() const { return prompt_; }
  // Calls on so many tokens let other Python threads run meanwhile.
  bool is_long() const { return prompt_.count > kLongCall; }

 private:
  static constexpr std::size_t kLongCall = 4096;

  TokenArgument ids_;
  Prompt prompt_;
};

}  // namespace caudex
