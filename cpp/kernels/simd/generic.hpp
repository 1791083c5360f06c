// Vectors of 4 floats through the compiler's vector extension (GCC and Clang): SSE2 on x86-64, NEON on AArch64, plain
// code elsewhere. Everything here has internal linkage; see avx512_bf16.hpp.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels/dtype.hpp"

namespace caudex::kernels {
namespace {

using Vec = float __attribute__((vector_size(16)));
using Int = std::int32_t __attribute__((vector_size(16)));
using Pairs = std::uint32_t __attribute__((vector_size(16)));
using Words = std::uint16_t __attribute__((vector_size(16)));
constexpr int kWidth = 4;

template <class T>
inline T load_as(const void* p) {
  T v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
template <class T>
inline T reinterpret(Pairs bits) {
  return load_as<T>(&bits);
}
inline Vec choose(Int mask, Vec a, Vec b) {
  const Int bits = (mask & load_as<Int>(&a)) | (~mask & load_as<Int>(&b));
  return load_as<Vec>(&bits);
}

inline Vec splat(float x) { return Vec{x, x, x, x}; }
inline Vec zeros() { return splat(0.0f); }
inline Vec load(const float* p) { return load_as<Vec>(p); }
inline void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof(v)); }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec max(Vec a, Vec b) { return choose(a > b, a, b); }
inline Vec min(Vec a, Vec b) { return choose(a < b, a, b); }
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// The nearest whole number, ties to even, and what is left, exact. Adding and taking away 1.5 * 2^23 rounds any
// magnitude below 2^22.
inline Vec nearest(Vec v) {
  const Vec shift = splat(12582912.0f);
  return (v + shift) - shift;
}
inline Vec distance_to_nearest(Vec v) { return v - nearest(v); }

inline Vec floor(Vec v) {
  const Vec whole = nearest(v);
  return choose(whole > v, whole - splat(1.0f), whole);
}

// v - floor(v).
inline Vec fraction(Vec v) { return v - floor(v); }

// v * 2^floor(exponent) for an exponent from -126 to 127; 0 below, whatever v is.
inline Vec scale_by_power(Vec v, Vec exponent) {
  const Int in_range = exponent >= splat(-126.0f);
  const Int biased = __builtin_convertvector(floor(choose(in_range, exponent, zeros())), Int) + 127;
  const Int bits = biased << 23;
  return choose(in_range, v * load_as<Vec>(&bits), zeros());
}

// v * 2^exponent for a whole exponent from -126 to 127; 0 below, and no number if v is none.
inline Vec scale_by_whole_power(Vec v, Vec exponent) {
  const Int in_range = exponent >= splat(-126.0f), below = exponent < splat(-126.0f);
  const Int biased = __builtin_convertvector(choose(in_range, exponent, zeros()), Int) + 127;
  const Int bits = biased << 23;
  return choose(below, zeros(), v * load_as<Vec>(&bits));
}
inline float largest(Vec v) {
  const float low = v[0] > v[1] ? v[0] : v[1], high = v[2] > v[3] ? v[2] : v[3];
  return low > high ? low : high;
}

// Lanes below `count` of `v`, the others of `other`.
inline Vec first_lanes(Vec v, int count, Vec other) {
  return choose(Int{0, 1, 2, 3} < Int{count, count, count, count}, v, other);
}

inline Vec load_bf16(const bf16* p) {
  return reinterpret<Vec>(Pairs{static_cast<std::uint32_t>(p[0]) << 16, static_cast<std::uint32_t>(p[1]) << 16,
                                static_cast<std::uint32_t>(p[2]) << 16, static_cast<std::uint32_t>(p[3]) << 16});
}

// Round to nearest, ties to even; a NaN stays a NaN.
inline void store_bf16(bf16* p, Vec v) {
  const Pairs bits = load_as<Pairs>(&v);
  const Pairs rounded = bits + ((bits >> 16) & 1) + 0x7fff;
  const Int number = v == v;
  const Pairs kept = (load_as<Pairs>(&number) & rounded) | (~load_as<Pairs>(&number) & (bits | 0x400000));
  for (int i = 0; i < 4; ++i) p[i] = static_cast<bf16>(kept[i] >> 16);
}

inline Pairs load_pairs(const char* p) { return load_as<Pairs>(p); }
inline Vec even_halves(Pairs p) { return reinterpret<Vec>(p << 16); }
inline Vec odd_halves(Pairs p) { return reinterpret<Vec>(p & 0xffff0000u); }

inline Int splat_int(std::int32_t x) { return Int{x, x, x, x}; }
inline Int bits_of(Vec v) { return load_as<Int>(&v); }
inline Int and_int(Int a, Int b) { return a & b; }
// Wraps, as the sum of what is no number may.
inline Int add_int(Int a, Int b) {
  const Pairs sum = load_as<Pairs>(&a) + load_as<Pairs>(&b);
  return load_as<Int>(&sum);
}
inline Int sub_int(Int a, Int b) { return a - b; }
inline Int max_int(Int a, Int b) {
  const Int larger = a > b;
  return (larger & a) | (~larger & b);
}
inline Int load_int(const char* p) { return load_as<Int>(p); }
inline void store_int(char* p, Int v) { __builtin_memcpy(p, &v, sizeof(v)); }
inline Int mul_int(Int a, Int b) {
  const Pairs product = load_as<Pairs>(&a) * load_as<Pairs>(&b);
  return load_as<Int>(&product);
}
template <int kBits>
inline Int shift_right(Int v) {
  const Pairs shifted = load_as<Pairs>(&v) >> kBits;
  return load_as<Int>(&shifted);
}
// The lower and the upper halves of products of unsigned 16-bit numbers.
inline Int low_products(Int a, Int b) {
  const Words products = load_as<Words>(&a) * load_as<Words>(&b);
  return load_as<Int>(&products);
}
inline Int high_products(Int a, Int b) {
  const Words left = load_as<Words>(&a), right = load_as<Words>(&b);
  Words products;
  for (int i = 0; i < 8; ++i) products[i] = static_cast<std::uint16_t>(std::uint32_t{left[i]} * right[i] >> 16);
  return load_as<Int>(&products);
}
// (a & mask) | b.
inline Int merge(Int a, Int mask, Int b) { return (a & mask) | b; }
inline Vec to_float(Int v) { return __builtin_convertvector(v, Vec); }
inline std::int32_t largest_int(Int v) {
  const std::int32_t low = v[0] > v[1] ? v[0] : v[1], high = v[2] > v[3] ? v[2] : v[3];
  return low > high ? low : high;
}
inline std::int32_t sum_of(Int v) { return v[0] + v[1] + v[2] + v[3]; }
inline void store_low_bytes(std::int8_t* p, Int v) {
  for (int i = 0; i < 4; ++i) p[i] = static_cast<std::int8_t>(v[i]);
}

// One step of a quantized product: 4 columns' 4 weights, and one row's 4 values in every column.
struct ByteProduct {
  using Sum = Int;
  struct Right {
    Int weights[4];
  };
  struct Left {
    std::int8_t values[4];
  };
  static constexpr int kDepth = 4;
  static constexpr int kLeftStep = 4;
  static Right right(const char* p) { return right(load_int(p)); }
  static Right right(Int weights) {
    const Int byte = splat_int(0xff);
    return {{weights & byte, shift_right<8>(weights) & byte, shift_right<16>(weights) & byte, shift_right<24>(weights)}};
  }
  static Left left(const char* p) { return load_as<Left>(p); }
  static Int accumulate(Int sum, Left a, const Right& b) {
    for (int i = 0; i < 4; ++i) sum += splat_int(a.values[i]) * b.weights[i];
    return sum;
  }
};

// The same of signed bytes to the right and unsigned ones to the left.
struct ByteValueProduct : ByteProduct {
  struct Left {
    std::uint8_t values[4];
  };
  static Right right(const char* p) {
    const Pairs bytes = load_pairs(p);
    const Pairs shifted[] = {bytes << 24, bytes << 16, bytes << 8, bytes};
    Right weights;
    for (int i = 0; i < 4; ++i) weights.weights[i] = load_as<Int>(&shifted[i]) >> 24;
    return weights;
  }
  static Left left(const char* p) { return load_as<Left>(p); }
  static Int accumulate(Int sum, Left a, const Right& b) {
    for (int i = 0; i < 4; ++i) sum += splat_int(a.values[i]) * b.weights[i];
    return sum;
  }
};

// Register tiles, rows x vectors: of the packed product and of attention.
#if defined(__aarch64__)
constexpr int kProductRows = 6, kProductVectors = 4;
constexpr int kQuantizedRows = 6;
constexpr int kAttentionRows = 6, kAttentionVectors = 4;
#else
constexpr int kProductRows = 3, kProductVectors = 4;
constexpr int kQuantizedRows = 3;
constexpr int kAttentionRows = 3, kAttentionVectors = 4;
#endif

}  // namespace
}  // namespace caudex::kernels

#include "kernels/simd/widened_bf16.hpp"
