#include "tokens.hpp"

#include <algorithm>
#include <limits>
#include <string>

namespace nb = nanobind;

namespace caudex {
namespace {

[[noreturn]] void reject(const std::string& value, std::size_t index) {
  throw nb::value_error(("token ids lie between 0 and 2147483647, got " + value + " at index " + std::to_string(index))
                            .c_str());
}

// A prompt is read here for the first time, so this is where its cache misses are: they are asked for well ahead, which
// the hardware does not do across pages.
void require_valid(const Token* tokens, std::size_t count) {
  constexpr std::size_t kLine = 64 / sizeof(Token), kAhead = 64 * kLine;
  for (std::size_t i = 0; i < std::min(count, kAhead); i += kLine) __builtin_prefetch(tokens + i);
  Token signs = 0;
  std::size_t read = 0;
  for (; read + kLine <= count; read += kLine) {
    __builtin_prefetch(tokens + read + kAhead);
    for (std::size_t j = 0; j < kLine; ++j) signs |= tokens[read + j];
  }
  for (; read < count; ++read) signs |= tokens[read];
  if (signs >= 0) return;
  for (std::size_t i = 0; i < count; ++i) {
    if (tokens[i] < 0) reject(std::to_string(tokens[i]), i);
  }
}

template <typename Integer>
void copy_strided(const nb::ndarray<nb::ro>& array, std::vector<Token>& out) {
  const auto* data = static_cast<const Integer*>(array.data());
  const std::int64_t stride = array.stride(0);
  out.resize(array.shape(0));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const Integer value = data[static_cast<std::int64_t>(i) * stride];
    if (value < Integer(0) || static_cast<std::uint64_t>(value) > std::numeric_limits<Token>::max()) {
      reject(std::to_string(value), i);
    }
    out[i] = static_cast<Token>(value);
  }
}

}  // namespace

TokenArgument::TokenArgument(nb::handle source) {
  const bool is_list = PyList_Check(source.ptr()) || PyTuple_Check(source.ptr());
  if (!is_list && from_array(source)) return;
  const bool is_text = PyUnicode_Check(source.ptr()) || PyBytes_Check(source.ptr()) || PyByteArray_Check(source.ptr());
  if (!PySequence_Check(source.ptr()) || is_text) {
    throw nb::type_error("tokens must be a list of integers or an integer array");
  }
  from_sequence(source);
}

bool TokenArgument::from_array(nb::handle source) {
  if (PyBytes_Check(source.ptr()) || PyByteArray_Check(source.ptr()) || !nb::ndarray_check(source)) return false;
  if (!nb::try_cast(source, array_) || array_.device_type() != nb::device::cpu::value) {
    throw nb::type_error("tokens must be an array in CPU memory");
  }
  if (array_.ndim() != 1) {
    throw nb::value_error(("tokens must have one dimension, got " + std::to_string(array_.ndim())).c_str());
  }
  size_ = array_.shape(0);
  const nb::dlpack::dtype type = array_.dtype();
  if (type == nb::dtype<std::int32_t>() && (size_ <= 1 || array_.stride(0) == 1)) {
    data_ = static_cast<const Token*>(array_.data());
    require_valid(data_, size_);
    return true;
  }
  if (type == nb::dtype<std::int32_t>()) copy_strided<std::int32_t>(array_, copied_);
  else if (type == nb::dtype<std::int64_t>()) copy_strided<std::int64_t>(array_, copied_);
  else if (type == nb::dtype<std::uint32_t>()) copy_strided<std::uint32_t>(array_, copied_);
  else if (type == nb::dtype<std::uint64_t>()) copy_strided<std::uint64_t>(array_, copied_);
  else if (type == nb::dtype<std::uint16_t>()) copy_strided<std::uint16_t>(array_, copied_);
  else throw nb::type_error("tokens must be an array of int32 or int64");
  data_ = copied_.data();
  return true;
}

void TokenArgument::from_sequence(nb::handle source) {
  const Py_ssize_t count = PySequence_Size(source.ptr());
  if (count < 0) throw nb::python_error();
  const bool is_list = PyList_Check(source.ptr());
  copied_.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    nb::object item = is_list ? nb::borrow(PyList_GetItem(source.ptr(), i))
                              : nb::steal(PySequence_GetItem(source.ptr(), i));
    if (!item.is_valid()) throw nb::python_error();
    // numpy integers are no ints, but have __index__; floats have not.
    if (!PyLong_Check(item.ptr())) item = nb::steal(PyNumber_Index(item.ptr()));
    if (!item.is_valid()) throw nb::python_error();
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(item.ptr(), &overflow);
    if (overflow != 0 || value < 0 || value > std::numeric_limits<Token>::max()) {
      reject(overflow != 0 ? "a huge number" : std::to_string(value), static_cast<std::size_t>(i));
    }
    copied_.push_back(static_cast<Token>(value));
  }
  data_ = copied_.data();
  size_ = copied_.size();
}

}  // namespace caudex
