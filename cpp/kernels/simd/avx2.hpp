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

// v * 2^floor(exponent) for an exponent from -126 to 127; 0 below, whatever v is.
inline Vec scale_by_power(Vec v, Vec exponent) {
  const __m256i floor = _mm256_cvtps_epi32(_mm256_floor_ps(exponent));
  const __m256i biased = _mm256_add_epi32(floor, _mm256_set1_epi32(127));
  const Vec scaled = _mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
  return _mm256_and_ps(scaled, _mm256_cmp_ps(exponent, _mm256_set1_ps(-126.0f), _CMP_GE_OQ));
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

// Register tiles, rows x vectors: of the packed product and of attention.
constexpr int kProductRows = 5, kProductVectors = 2;
constexpr int kAttentionRows = 5, kAttentionVectors = 2;

}  // namespace
}  // namespace caudex::kernels

#include "kernels/simd/widened_bf16.hpp"
