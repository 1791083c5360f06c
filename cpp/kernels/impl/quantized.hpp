// Rows in 8 bits (see kernel_table.hpp). Included after elementwise.hpp.
#pragma once

namespace caudex::kernels {
namespace {

// Adding this rounds a float below 2^22 in magnitude to a whole number, ties to even, which is then in its last bits.
constexpr float kRoundingShift = 12582912.0f;  // 1.5 * 2^23

inline Vec load_as_float(const float* p) { return load(p); }
inline Vec load_as_float(const bf16* p) { return load_bf16(p); }

// The bits of the largest magnitude; those of a NaN are above all others'.
inline float largest_magnitude(const Vec* inputs, int count) {
  const Int magnitude = splat_int(0x7fffffff);
  Int most = and_int(bits_of(inputs[0]), magnitude);
  for (int v = 1; v < count; ++v) most = max_int(most, and_int(bits_of(inputs[v]), magnitude));
  const std::int32_t bits = largest_int(most);
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

template <class T>
inline void quantize_group(QuantizedGroup& target, const T* source) {
  constexpr int kVectors = kGroupInputs / kWidth;
  Vec inputs[kVectors];
  CAUDEX_UNROLL
  for (int v = 0; v < kVectors; ++v) inputs[v] = load_as_float(source + v * kWidth);
  const float most = largest_magnitude(inputs, kVectors);
  const bool zeros = most < kLeastMagnitude;
  const Vec inverse = splat(zeros ? 0.0f : kMostByte / most), shift = splat(kRoundingShift);
  const Int shift_bits = bits_of(shift);
  Int sum = splat_int(0);
  CAUDEX_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    const Int value = sub_int(bits_of(add(mul(inputs[v], inverse), shift)), shift_bits);
    sum = add_int(sum, value);
    store_low_bytes(target.values + v * kWidth, value);
  }
  target.scale = zeros ? 0.0f : most / kMostByte;
  target.offset = most <= __FLT_MAX__ ? -kWeightOffset * sum_of(sum) : 0;
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
