// Rows in 8 bits (see kernel_table.hpp). Included after elementwise.hpp.
#pragma once

namespace caudex::kernels {
namespace {

// Adding this rounds a float below 2^22 in magnitude to a whole number, ties to even, which is then in its last bits.
constexpr float kRoundingShift = 12582912.0f;  // 1.5 * 2^23

inline Vec load_as_float(const float* p) { return load(p); }
inline Vec load_as_float(const bf16* p) { return load_bf16(p); }

// Of numbers without a sign the larger has the larger bits; those of a NaN are above all others'.
inline Int magnitude_bits(Vec input) { return and_int(bits_of(input), splat_int(0x7fffffff)); }

inline float largest_of_bits(Int magnitudes) {
  const std::int32_t bits = largest_int(magnitudes);
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// Inputs times `inverse`, rounded to whole numbers, ties to even.
inline Int rounded(Vec inputs, Vec inverse) {
  const Vec shift = splat(kRoundingShift);
  return sub_int(bits_of(add(mul(inputs, inverse), shift)), bits_of(shift));
}

template <class T>
inline void quantize_group(QuantizedGroup& target, const T* source) {
  constexpr int kVectors = kGroupInputs / kWidth;
  Vec inputs[kVectors];
  CAUDEX_UNROLL
  for (int v = 0; v < kVectors; ++v) inputs[v] = load_as_float(source + v * kWidth);
  Int magnitudes = magnitude_bits(inputs[0]);
  CAUDEX_UNROLL
  for (int v = 1; v < kVectors; ++v) magnitudes = max_int(magnitudes, magnitude_bits(inputs[v]));
  const float most = largest_of_bits(magnitudes);
  const bool zeros = most < kLeastMagnitude;
  const Vec inverse = splat(zeros ? 0.0f : kMostByte / most);
  Int sum = splat_int(0);
  CAUDEX_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    const Int value = rounded(inputs[v], inverse);
    sum = add_int(sum, value);
    store_low_bytes(target.values + v * kWidth, value);
  }
  target.scale = zeros ? 0.0f : most / kMostByte;
  target.offset = most <= __FLT_MAX__ ? -kWeightOffset * sum_of(sum) : 0;
}

template <class T>
QuantizedRow quantize_row(std::int8_t* target, const T* source, int count) {
  const int whole = count / kWidth * kWidth, left = count - whole;
  T rest[kWidth] = {};
  __builtin_memcpy(rest, source + whole, left * sizeof(T));
  Int magnitudes = magnitude_bits(load_as_float(rest));
  for (int i = 0; i < whole; i += kWidth) {
    magnitudes = max_int(magnitudes, magnitude_bits(load_as_float(source + i)));
  }
  const float most = largest_of_bits(magnitudes);
  const bool zeros = most < kLeastMagnitude;
  const Vec inverse = splat(zeros ? 0.0f : kMostByte / most);
  std::int8_t last[kWidth];
  const Int last_value = rounded(load_as_float(rest), inverse);
  store_low_bytes(last, last_value);
  Int sum = last_value;
  for (int i = 0; i < whole; i += kWidth) {
    const Int value = rounded(load_as_float(source + i), inverse);
    sum = add_int(sum, value);
    store_low_bytes(target + i, value);
  }
  __builtin_memcpy(target + whole, last, round_up(left, 4));
  return {zeros ? 0.0f : most / kMostByte, most <= __FLT_MAX__ ? -kWeightOffset * sum_of(sum) : 0};
}

template <class T>
void quantize(QuantizedGroup* target, const T* source, int count) {
  for (; count >= kGroupInputs; count -= kGroupInputs, source += kGroupInputs) quantize_group(*target++, source);
  if (count == 0) return;
  T rest[kGroupInputs] = {};
  __builtin_memcpy(rest, source, count * sizeof(T));
  quantize_group(*target, rest);
}

}  // namespace
}  // namespace caudex::kernels
