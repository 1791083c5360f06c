// Vectors of 16 floats and bfloat16 pair products: AVX-512 F, BW, DQ, VL, BF16 and VNNI (no
// processor has BF16 without VNNI).
// Everything here has internal linkage: code compiled for this instruction set must not reach other files.
#pragma once

#include <immintrin.h>

#include "kernels/kernel_table.hpp"

namespace caudex::kernels {
namespace {

using Vec = __m512;
constexpr int kWidth = 16;

inline Vec zeros() { return _mm512_setzero_ps(); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

// v - floor(v), and v * 2^floor(exponent): both also for an exponent of minus infinity, which gives 0.
inline Vec fraction(Vec v) { return _mm512_reduce_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline Vec scale_by_power(Vec v, Vec exponent) { return _mm512_scalef_ps(v, exponent); }

// The nearest whole number, ties to even, and what is left, exact; for minus infinity 0 is left.
inline Vec nearest(Vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec distance_to_nearest(Vec v) { return _mm512_reduce_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// v * 2^exponent for a whole exponent from -126 to 127; 0 below, and no number if v is none.
inline Vec scale_by_whole_power(Vec v, Vec exponent) {
  const __mmask16 normal = _mm512_cmp_ps_mask(exponent, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, v, exponent);
}
inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }

// Lanes below `count` of `v`, the others of `other`.
inline Vec first_lanes(Vec v, int count, Vec other) {
  const __mmask16 mask = count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
  return _mm512_mask_blend_ps(mask, other, v);
}

inline Vec load_bf16(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void store_bf16(bf16* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
}

// Right and left operands of one step of a bfloat16 product: 16 columns' pairs, and one row's pair in every column.
struct Bf16Product {
  using Sum = Vec;
  struct Right {
    __m512bh pairs;
  };
  struct Left {
    __m512bh pairs;
  };
  static constexpr int kDepth = 2;
  static constexpr int kLeftStep = 4;
  static constexpr int kWeightDegree = 4;
  static Right right(const char* p) { return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(p))}; }
  static Left left(const char* p) {
    int pair;
    __builtin_memcpy(&pair, p, sizeof(pair));
    return {reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair))};
  }
  static Vec accumulate(Vec sum, Left a, Right b) { return _mm512_dpbf16_ps(sum, a.pairs, b.pairs); }
  static void store_left(char* p, int index, Vec v) { store_bf16(reinterpret_cast<bf16*>(p) + index, v); }
};
constexpr int kBf16LeftElementSize = 2;

// Not __m512i, of which GCC 12 keeps arrays in memory.
using Int = std::int32_t __attribute__((vector_size(64)));
inline __m512i bits_of(Int v) { return reinterpret_cast<__m512i>(v); }
inline Int bits_of(Vec v) { return reinterpret_cast<Int>(v); }
inline Int splat_int(std::int32_t x) { return reinterpret_cast<Int>(_mm512_set1_epi32(x)); }
inline Int and_int(Int a, Int b) { return a & b; }
// Wraps, as the sum of what is no number may.
inline Int add_int(Int a, Int b) { return reinterpret_cast<Int>(_mm512_add_epi32(bits_of(a), bits_of(b))); }
inline Int sub_int(Int a, Int b) { return a - b; }
inline Int max_int(Int a, Int b) { return reinterpret_cast<Int>(_mm512_max_epi32(bits_of(a), bits_of(b))); }
inline Int load_int(const char* p) { return reinterpret_cast<Int>(_mm512_loadu_si512(p)); }
inline void store_int(char* p, Int v) { _mm512_storeu_si512(p, bits_of(v)); }
inline Int mul_int(Int a, Int b) { return reinterpret_cast<Int>(_mm512_mullo_epi32(bits_of(a), bits_of(b))); }
template <int kBits>
inline Int shift_right(Int v) {
  return reinterpret_cast<Int>(_mm512_srli_epi32(bits_of(v), kBits));
}
// The lower and the upper halves of products of unsigned 16-bit numbers.
inline Int low_products(Int a, Int b) { return reinterpret_cast<Int>(_mm512_mullo_epi16(bits_of(a), bits_of(b))); }
inline Int high_products(Int a, Int b) { return reinterpret_cast<Int>(_mm512_mulhi_epu16(bits_of(a), bits_of(b))); }
// (a & mask) | b.
inline Int merge(Int a, Int mask, Int b) {
  return reinterpret_cast<Int>(_mm512_ternarylogic_epi32(bits_of(a), bits_of(mask), bits_of(b), 0xea));
}
inline Vec to_float(Int v) { return _mm512_cvtepi32_ps(bits_of(v)); }
inline std::int32_t largest_int(Int v) { return _mm512_reduce_max_epi32(bits_of(v)); }
inline std::int32_t sum_of(Int v) { return _mm512_reduce_add_epi32(bits_of(v)); }
inline void store_low_bytes(std::int8_t* p, Int v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(bits_of(v)));
}

// One step of a quantized product: 16 columns' 4 weights, and one row's 4 values in every column.
struct ByteProduct {
  using Sum = Int;
  struct Right {
    Int weights;
  };
  struct Left {
    Int values;
  };
  static constexpr int kDepth = 4;
  static constexpr int kLeftStep = 4;
  static Right right(const char* p) { return {load_int(p)}; }
  static Right right(Int weights) { return {weights}; }
  static Left left(const char* p) {
    int values;
    __builtin_memcpy(&values, p, sizeof(values));
    return {splat_int(values)};
  }
  static Int accumulate(Int sum, Left a, Right b) {
    return reinterpret_cast<Int>(_mm512_dpbusd_epi32(bits_of(sum), bits_of(b.weights), bits_of(a.values)));
  }
};

// The same of signed bytes to the right and unsigned ones to the left.
struct ByteValueProduct : ByteProduct {
  static Int accumulate(Int sum, Left a, Right b) {
    return reinterpret_cast<Int>(_mm512_dpbusd_epi32(bits_of(sum), bits_of(a.values), bits_of(b.weights)));
  }
};

// Two steps of a coded panel (see kernel_table.hpp), 2 vectors each: a table look-up in every upper byte.
inline void decode_pair(__m512i (&weights)[4], const char* coded, __m512i upper_bytes) {
  const __m512i code = _mm512_set1_epi16(0x0f00), nothing = _mm512_set1_epi16(0x0080);
  const auto load_words = [](const char* p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  };
  const auto combine = [&](const char* lower, __m512i codes) {
    const __m512i places = _mm512_ternarylogic_epi32(codes, code, nothing, 0xea);  // (a & b) | c
    return _mm512_or_si512(load_words(lower), _mm512_shuffle_epi8(upper_bytes, places));
  };
  _Pragma("GCC unroll 2") for (int step = 0; step < 2; ++step) {
    const __m512i codes = load_words(coded + 2 * kPanelColumns * 2 + step * kPanelColumns);
    const char* lower = coded + step * kPanelColumns * 2;
    weights[2 * step] = combine(lower, _mm512_slli_epi16(codes, 8));
    weights[2 * step + 1] = combine(lower + kPanelColumns, _mm512_slli_epi16(codes, 4));
  }
}

// Register tiles, rows x vectors: of the packed product and of attention.
constexpr int kProductRows = 12, kProductVectors = 2;
constexpr int kQuantizedRows = 6;
constexpr int kAttentionRows = 6, kAttentionVectors = 4;

}  // namespace
}  // namespace caudex::kernels
