// Functions of single vectors. Included after one vector header of kernels/simd.
#pragma once

namespace caudex::kernels {
namespace {

// 2^x for x <= 127, within 2 units in the last place; 2^0 is exactly 1 and 2^-inf is 0.
inline Vec exp2(Vec x) {
  x = max(x, splat(-150.0f));
  const Vec whole = round_to_even(x);
  const Vec f = sub(x, whole);
  // Taylor coefficients ln(2)^n / n! on [-1/2, 1/2]; the first term left out is below 1e-8.
  Vec p = splat(1.5403530394e-4f);
  p = multiply_add(p, f, splat(1.3333558146e-3f));
  p = multiply_add(p, f, splat(9.6181291076e-3f));
  p = multiply_add(p, f, splat(5.5504108664e-2f));
  p = multiply_add(p, f, splat(2.4022650696e-1f));
  p = multiply_add(p, f, splat(6.9314718056e-1f));
  p = multiply_add(p, f, splat(1.0f));
  return scale_by_power(p, whole);
}

// x * sigmoid(x).
inline Vec silu(Vec x) {
  const Vec exponent = min(mul(x, splat(-1.44269504088896340736f)), splat(127.0f));
  return div(x, add(splat(1.0f), exp2(exponent)));
}

inline void store_as(float* p, Vec v) { store(p, v); }
inline void store_as(bf16* p, Vec v) { store_bf16(p, v); }

// Store the first `count` lanes of `v`.
template <class T>
inline void store_first(T* p, Vec v, int count) {
  if (count >= kWidth) return store_as(p, v);
  T values[kWidth];
  store_as(values, v);
  if (count > 0) __builtin_memcpy(p, values, count * sizeof(T));
}

// The sum of 16 lanes in one fixed order, whatever the vector width.
inline float sum_lanes(const float* lanes) {
  float sum = 0.0f;
  for (int i = 0; i < kSumLanes; ++i) sum += lanes[i];
  return sum;
}

void widen_bf16(float* target, const bf16* source, int count) {
  int i = 0;
  for (; i + kWidth <= count; i += kWidth) store(target + i, load_bf16(source + i));
  for (; i < count; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(source[i]) << 16;
    __builtin_memcpy(target + i, &bits, sizeof(bits));
  }
}

void load_left_bf16(char* target, const bf16* source, int count, int padded_count) {
  if (kBf16LeftElementSize == 2) {
    __builtin_memcpy(target, source, count * sizeof(bf16));
  } else {
    widen_bf16(reinterpret_cast<float*>(target), source, count);
  }
  __builtin_memset(target + count * kBf16LeftElementSize, 0, (padded_count - count) * kBf16LeftElementSize);
}

}  // namespace
}  // namespace caudex::kernels
