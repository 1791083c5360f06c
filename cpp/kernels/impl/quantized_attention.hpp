// Softmax attention over one 64-token step of keys and values in 8 bits (see kernel_table.hpp). Included after
// attention.hpp and quantized.hpp.
//
// Queries in 8 bits, too, and an integer product of each 64 keys: SageAttention (Zhang et al., 2024).
#pragma once

namespace caudex::kernels {
namespace {

// Where the scales of vector `v` of a step's 64 tokens stand behind the `bytes` of its chunk.
inline const float* chunk_scales(const char* const (&chunks)[kStepChunks], int v, std::size_t bytes) {
  constexpr int kPerChunk = kChunkTokens / kWidth;
  return reinterpret_cast<const float*>(chunks[v / kPerChunk] + bytes) + v % kPerChunk * kWidth;
}

inline Vec key_scales(const AttentionStep& step, int v) {
  return load(chunk_scales(step.keys, v, static_cast<std::size_t>(step.key_steps) * (kChunkTokens * 4)));
}

inline Vec value_scales(const AttentionStep& step, int v) {
  return load(chunk_scales(step.values, v, static_cast<std::size_t>(step.padded_head_dim) * kChunkTokens));
}

inline QuantizedRow query_end(const AttentionStep& step, int row) {
  QuantizedRow end;
  __builtin_memcpy(&end, step.query + row * step.query_row + step.key_steps * ByteProduct::kLeftStep, sizeof(end));
  return end;
}

struct QuantizedScores {
  using Product = ByteProduct;
  static Int start(const AttentionStep& step, int row) { return splat_int(query_end(step, row).offset); }
  static Vec score(const AttentionStep& step, int v, Int sum) { return mul(to_float(sum), key_scales(step, v)); }
};

// Turn a row's scores, in place, into weights times the scales of their values; bring its sum of weights up to date.
// Returns the largest.
inline float weigh_scores(const AttentionStep& step, int row, float* scores, float scale, float factor) {
  float* sum = step.sum + row * kSumLanes;
  constexpr int kSumVectors = kSumLanes / kWidth;
  Vec sums[kSumVectors];
  CAUDEX_UNROLL
  for (int v = 0; v < kSumVectors; ++v) sums[v] = mul(load(sum + v * kWidth), splat(factor));
  const Vec shift = splat(-step.maximum[row]);
  const int visible = step.visible[row];
  Int most = splat_int(0);
  CAUDEX_UNROLL
  for (int v = 0; v < kStepVectors; ++v) {
    const Vec exponent = multiply_then_add(load(scores + v * kWidth), splat(scale), shift);
    const Vec weight = portable_exp2<3>(exponent);
    sums[v % kSumVectors] = add(sums[v % kSumVectors], weight);
    Vec scaled = mul(weight, value_scales(step, v));
    // What a token that the row does not see has left there may be no number.
    if (visible < kStepTokens) scaled = first_lanes(scaled, visible - v * kWidth, zeros());
    most = max_int(most, magnitude_bits(scaled));
    store(scores + v * kWidth, scaled);
  }
  CAUDEX_UNROLL
  for (int v = 0; v < kSumVectors; ++v) store(sum + v * kWidth, sums[v]);
  return largest_of_bits(most);
}

// Quantize R rows' weights to bytes by the largest of each; `units`: what 1 stands for.
template <int R>
inline void round_weights(const float (&weights)[R][kStepTokens], const float (&most)[R], float (&units)[R],
                          std::uint8_t (&bytes)[R][kStepTokens]) {
  const Vec shift = splat(kRoundingShift);
  CAUDEX_UNROLL
  for (int r = 0; r < R; ++r) {
    const bool zeros = most[r] < kLeastMagnitude;
    units[r] = zeros ? 0.0f : most[r] / kMostWeight;
    const Vec inverse = splat(zeros ? 0.0f : kMostWeight / most[r]);
    CAUDEX_UNROLL
    for (int v = 0; v < kStepVectors; ++v) {
      const Vec rounded = add(mul(load(weights[r] + v * kWidth), inverse), shift);
      store_low_bytes(reinterpret_cast<std::int8_t*>(bytes[r]) + v * kWidth, bits_of(rounded));
    }
  }
}

// Shrink the rows' outputs by their factors, then add what the bytes make of the values.
template <int R, int V, bool kFetchNext>
inline void add_quantized_values(const AttentionStep& step, int first, int column, const float (&factors)[R],
                                 const float (&units)[R], const std::uint8_t (&bytes)[R][kStepTokens], int tokens) {
  Int sums[R][V];
  CAUDEX_UNROLL
  for (int r = 0; r < R; ++r) {
    CAUDEX_UNROLL
    for (int v = 0; v < V; ++v) sums[r][v] = splat_int(0);
  }
  multiply_values<ByteValueProduct, R, V, kFetchNext>(sums, step, column, reinterpret_cast<const char*>(bytes), tokens);
  float* output = step.output + first * step.padded_head_dim + column;
  CAUDEX_UNROLL
  for (int r = 0; r < R; ++r) {
    CAUDEX_UNROLL
    for (int v = 0; v < V; ++v) {
      float* at = output + r * step.padded_head_dim + v * kWidth;
      store(at, add(mul(load(at), splat(factors[r])), mul(to_float(sums[r][v]), splat(units[r]))));
    }
  }
}

template <int R, bool kFetchNext>
void attend_quantized_rows(const AttentionStep& step, int first) {
  const int tokens = tokens_seen<R>(step, first);
  if (tokens == 0) return;
  alignas(64) float scores[R][kStepTokens];
  alignas(64) std::uint8_t bytes[R][kStepTokens];
  float scales[R], tops[R], factors[R], most[R], units[R];
  score_rows<QuantizedScores, R, kFetchNext>(step, first, scores);
  CAUDEX_UNROLL
  for (int r = 0; r < R; ++r) {
    scales[r] = query_end(step, first + r).scale;
    tops[r] = mask_row(scores[r], step.visible[first + r]) * scales[r];
  }
  raise_maxima(step, first, tops, factors);
  for (int r = 0; r < R; ++r) {
    if (step.visible[first + r] > 0) {
      most[r] = weigh_scores(step, first + r, scores[r], scales[r], factors[r]);
    } else {
      __builtin_memset(scores[r], 0, sizeof(scores[r]));
      most[r] = 0.0f;
    }
  }
  round_weights(scores, most, units, bytes);
  int column = 0;
  for (; column + kAttentionVectors * kWidth <= step.padded_head_dim; column += kAttentionVectors * kWidth) {
    add_quantized_values<R, kAttentionVectors, kFetchNext>(step, first, column, factors, units, bytes, tokens);
  }
  for (; column < step.padded_head_dim; column += kWidth) {
    add_quantized_values<R, 1, kFetchNext>(step, first, column, factors, units, bytes, tokens);
  }
}

struct QuantizedAttention {
  template <int R, bool kFetchNext>
  static void attend(const AttentionStep& step, int first) {
    attend_quantized_rows<R, kFetchNext>(step, first);
  }
};

}  // namespace
}  // namespace caudex::kernels
