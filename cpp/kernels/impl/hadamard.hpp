// The Walsh-Hadamard transform of a row, as sums and differences in one order. Included after quantized.hpp.
#pragma once

#include <utility>

namespace caudex::kernels {
namespace {

// Lane i of lane i ^ kHalf.
template <int kHalf, int... kLane>
inline Vec swap_lanes(Vec v, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(v, v, (kLane ^ kHalf)...);
}

// Sums of the lanes kHalf apart in the lower one, differences in the upper. The products are exact.
template <int kHalf, int... kLane>
inline Vec add_and_subtract(Vec v, std::integer_sequence<int, kLane...> lanes) {
  static constexpr float kSigns[] = {(kLane & kHalf ? -1.0f : 1.0f)...};
  return multiply_add(v, load(kSigns), swap_lanes<kHalf>(v, lanes));
}

// The stages within a vector, of transforms over `size` lanes or more.
template <int kHalf = 1>
inline Vec transform_lanes(Vec v, int size) {
  if constexpr (kHalf < kWidth) {
    if (kHalf < size) {
      return transform_lanes<2 * kHalf>(
          add_and_subtract<kHalf>(v, std::make_integer_sequence<int, kWidth>{}), size);
    }
  }
  return v;
}

// In place and not normalised, over groups of as many elements as the largest power of two in `count`. `x` has room for
// whole vectors.
void hadamard(float* x, int count) {
  const int size = count & -count;
  for (int i = 0; i < count; i += kWidth) store(x + i, transform_lanes(load(x + i), size));
  for (int half = kWidth; half < size; half *= 2) {
    for (int i = 0; i < count; i += kWidth) {
      if (i & half) continue;
      const Vec a = load(x + i), b = load(x + i + half);
      store(x + i, add(a, b));
      store(x + i + half, sub(a, b));
    }
  }
}

inline void widen(float* target, const float* source, int count) {
  __builtin_memcpy(target, source, count * sizeof(float));
}
inline void widen(float* target, const bf16* source, int count) { widen_bf16(target, source, count); }

template <class T>
QuantizedRow quantize_hadamard(std::int8_t* target, const T* source, int count) {
  alignas(64) float row[kMaxHeadDim];
  store(row + (count - 1) / kWidth * kWidth, zeros());
  widen(row, source, count);
  hadamard(row, count);
  return quantize_row(target, row, count);
}

}  // namespace
}  // namespace caudex::kernels
