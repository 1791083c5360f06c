// Vectors of 8 floats: AVX2 and FMA. Everything here has internal linkage; see avx512_bf16.hpp.
#pragma once

#include <immintrin.h>

#include "kernels/dtype.hpp"

namespace caudex::kernels {
namespace {

using Vec = __m256;
using Pairs = __m256i;
constexpr int kWidth = 8;

inline Vec zeros() { return _mm256_setzero_ps(); }
inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

// v - floor(v).
inline Vec fraction(Vec v) { return _mm256_sub_ps(v, _mm256_floor_ps(v)); }

// The nearest whole number, ties to even, and what is left, exact.
inline Vec nearest(Vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec distance_to_nearest(Vec v) { return _mm256_sub_ps(v, nearest(v)); }

// v * 2^floor(exponent) for an exponent from -126 to 127; 0 below, whatever v is.
inline Vec scale_by_power(Vec v, Vec exponent) {
  const __m256i floor = _mm256_cvtps_epi32(_mm256_floor_ps(exponent));
  const __m256i biased = _mm256_add_epi32(floor, _mm256_set1_epi32(127));
  const Vec scaled = _mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
  return _mm256_and_ps(scaled, _mm256_cmp_ps(exponent, _mm256_set1_ps(-126.0f), _CMP_GE_OQ));
}

// v * 2^exponent for a whole exponent from -126 to 127; 0 below, and no number if v is none.
inline Vec scale_by_whole_power(Vec v, Vec exponent) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127));
  const Vec scaled = _mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
  return _mm256_and_ps(scaled, _mm256_cmp_ps(exponent, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ));
}
inline float largest(Vec v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

// Lanes below `count` of `v`, the others of `other`.
inline Vec first_lanes(Vec v, int count, Vec other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane)));
}

inline Vec load_bf16(const bf16* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// Round to nearest, ties to even; a NaN stays a NaN.
inline void store_bf16(bf16* p, Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i lowest = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(lowest, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i halves = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

inline Pairs load_pairs(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Vec even_halves(Pairs p) { return _mm256_castsi256_ps(_mm256_slli_epi32(p, 16)); }
inline Vec odd_halves(Pairs p) {
  return _mm256_castsi256_ps(_mm256_and_si256(p, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

using Int = __m256i;
inline Int splat_int(std::int32_t x) { return _mm256_set1_epi32(x); }
inline Int bits_of(Vec v) { return _mm256_castps_si256(v); }
inline Int and_int(Int a, Int b) { return _mm256_and_si256(a, b); }
inline Int add_int(Int a, Int b) { return _mm256_add_epi32(a, b); }
inline Int sub_int(Int a, Int b) { return _mm256_sub_epi32(a, b); }
inline Int max_int(Int a, Int b) { return _mm256_max_epi32(a, b); }
inline Int load_int(const char* p) { return load_pairs(p); }
inline void store_int(char* p, Int v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
inline Int mul_int(Int a, Int b) { return _mm256_mullo_epi32(a, b); }
template <int kBits>
inline Int shift_right(Int v) {
  return _mm256_srli_epi32(v, kBits);
}
// The lower and the upper halves of products of unsigned 16-bit numbers.
inline Int low_products(Int a, Int b) { return _mm256_mullo_epi16(a, b); }
inline Int high_products(Int a, Int b) { return _mm256_mulhi_epu16(a, b); }
// (a & mask) | b.
inline Int merge(Int a, Int mask, Int b) { return _mm256_or_si256(_mm256_and_si256(a, mask), b); }
inline Vec to_float(Int v) { return _mm256_cvtepi32_ps(v); }
inline std::int32_t largest_int(Int v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}
inline std::int32_t sum_of(Int v) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
inline void store_low_bytes(std::int8_t* p, Int v) {
  const __m256i lowest = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                          0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i bytes = _mm256_shuffle_epi8(v, lowest);
  const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), both);
}

// One step of a quantized product: 8 columns' 4 weights, and one row's 4 values in every column. In words, because the
// instruction that multiplies bytes adds two products in 16 bits, and saturates.
struct ByteProduct {
  using Sum = Int;
  struct Right {
    __m256i even, odd;
  };
  struct Left {
    __m256i even, odd;
  };
  static constexpr int kDepth = 4;
  static constexpr int kLeftStep = 4;
  static Right right(const char* p) { return right(load_int(p)); }
  static Right right(Int weights) {
    return {_mm256_and_si256(weights, _mm256_set1_epi16(0x00ff)), _mm256_srli_epi16(weights, 8)};
  }
  static Left left(const char* p) {
    int word;
    __builtin_memcpy(&word, p, sizeof(word));
    const __m256i values = _mm256_set1_epi32(word);
    return {_mm256_srai_epi16(_mm256_slli_epi16(values, 8), 8), _mm256_srai_epi16(values, 8)};
  }
  static Int accumulate(Int sum, Left a, Right b) {
    const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(a.even, b.even), _mm256_madd_epi16(a.odd, b.odd));
    return _mm256_add_epi32(sum, products);
  }
};

// The same of signed bytes to the right and unsigned ones to the left.
struct ByteValueProduct : ByteProduct {
  static Right right(const char* p) {
    const __m256i values = load_pairs(p);
    return {_mm256_srai_epi16(_mm256_slli_epi16(values, 8), 8), _mm256_srai_epi16(values, 8)};
  }
  static Left left(const char* p) {
    int word;
    __builtin_memcpy(&word, p, sizeof(word));
    const __m256i weights = _mm256_set1_epi32(word);
    return {_mm256_and_si256(weights, _mm256_set1_epi16(0x00ff)), _mm256_srli_epi16(weights, 8)};
  }
};

// Register tiles, rows x vectors: of the packed product and of attention.
constexpr int kProductRows = 5, kProductVectors = 2;
constexpr int kQuantizedRows = 5;
constexpr int kAttentionRows = 5, kAttentionVectors = 2;

}  // namespace
}  // namespace caudex::kernels

#include "kernels/simd/widened_bf16.hpp"
