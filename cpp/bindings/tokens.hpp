// Token ids as they come from Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

#include "cache/types.hpp"

namespace caudex {

// The token ids of a list, a tuple, or a one-dimensional integer array; without a copy where that is possible.
// Throws ValueError for an id that is negative or above 2^31 - 1, TypeError for what is no sequence of integers.
class TokenArgument {
 public:
  explicit TokenArgument(nanobind::handle source);

  const Token* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  bool from_array(nanobind::handle source);
  void from_sequence(nanobind::handle source);

  nanobind::ndarray<nanobind::ro> array_;  // keeps the memory alive
  std::vector<Token> copied_;
  const Token* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace caudex
