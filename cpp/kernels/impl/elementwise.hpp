// Functions of single vectors. Included after one vector header of kernels/simd.
#pragma once

namespace caudex::kernels {
namespace {

// a * b + c with the product rounded first, which every instruction set can do alike.
inline Vec multiply_then_add(Vec a, Vec b, Vec c) { return add(mul(a, b), c); }

// 2^f on [0, 1], as 1 + f * (c[0] + f * (c[1] + ...)): the least relative error for the degree, here 2e-9 and 3e-6.
template <int kDegree>
constexpr float kExp2[kDegree] = {};
template <>
constexpr float kExp2<6>[6] = {6.931470444e-1f, 2.402293056e-1f, 5.548528061e-2f,
                               9.675451592e-3f, 1.246784619e-3f, 2.161291589e-4f};
template <>
constexpr float kExp2<4>[4] = {6.930448448e-1f, 2.412802054e-1f, 5.224247285e-2f, 1.342668509e-2f};

// 2^x for x <= 127; 2^0 is exactly 1 and 2^-inf is 0. With the degree 6, within 2 units in the last place.
template <int kDegree = 6>
inline Vec exp2(Vec x) {
  const Vec f = fraction(x);
  Vec p = splat(kExp2<kDegree>[kDegree - 1]);
  CAUDEX_UNROLL
  for (int i = kDegree - 2; i >= 0; --i) p = multiply_add(p, f, splat(kExp2<kDegree>[i]));
  return scale_by_power(multiply_add(p, f, splat(1.0f)), x);
}

// The same on [-1/2, 1/2], for the relative errors 2e-9 and 1e-4.
template <int kDegree>
constexpr float kPortableExp2[kDegree] = {};
template <>
constexpr float kPortableExp2<6>[6] = {6.931472029e-1f, 2.402264791e-1f, 5.550332471e-2f,
                                       9.618437357e-3f, 1.339887458e-3f, 1.535336243e-4f};
template <>
constexpr float kPortableExp2<3>[3] = {6.932829284e-1f, 2.422109782e-1f, 5.500893868e-2f};

// 2^x for x <= 0, to the bit on every instruction set: what is rounded is rounded to nearest, products before they are
// added to. 2^0 is exactly 1; below about 2^-126 it is 0.
template <int kDegree = 6>
inline Vec portable_exp2(Vec x) {
  const Vec f = distance_to_nearest(x);
  Vec p = splat(kPortableExp2<kDegree>[kDegree - 1]);
  CAUDEX_UNROLL
  for (int i = kDegree - 2; i >= 0; --i) p = multiply_then_add(p, f, splat(kPortableExp2<kDegree>[i]));
  return scale_by_whole_power(multiply_then_add(p, f, splat(1.0f)), nearest(x));
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
