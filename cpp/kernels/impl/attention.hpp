// Softmax attention over one 64-token step of KV blocks. Included after kernels/simd/*, product.hpp, elementwise.hpp.
//
// The online softmax of FlashAttention (Dao et al., 2022) with steps at fixed token positions: a row's state after a
// step depends on its query and the tokens before it alone, never on the chunk or the batch it came in.
#pragma once

namespace caudex::kernels {
namespace {

constexpr int kStepVectors = kStepTokens / kWidth;
constexpr float kMinusInfinity = -__builtin_inff();

// Where vector `v` of a step's 64 tokens begins in its key chunk.
inline const char* key_vector(const AttentionStep& step, int v) {
  constexpr int kPerChunk = kChunkTokens / kWidth;
  return step.keys[v / kPerChunk] + (v % kPerChunk) * kWidth * 4;
}

template <class Product, int R>
inline void score_rows(const AttentionStep& step, int first, float (&scores)[R][kStepTokens]) {
  for (int v = 0; v < kStepVectors; v += kAttentionVectors) {
    const char* keys[kAttentionVectors];
    Vec sums[R][kAttentionVectors];
    CAUDEX_UNROLL
    for (int c = 0; c < kAttentionVectors; ++c) {
      keys[c] = key_vector(step, v + c);
      CAUDEX_UNROLL
      for (int r = 0; r < R; ++r) sums[r][c] = zeros();
    }
    multiply_tile<Product, R, kAttentionVectors>(sums, step.query + first * step.query_row, step.query_row, keys,
                                                 kChunkTokens * 4, step.key_steps);
    CAUDEX_UNROLL
    for (int r = 0; r < R; ++r) {
      CAUDEX_UNROLL
      for (int c = 0; c < kAttentionVectors; ++c) store(scores[r] + (v + c) * kWidth, sums[r][c]);
    }
  }
}

// Turn a row's scores into weights (left operands for the values) and bring its maximum and sum up to date.
// Returns the factor by which the row's output so far shrinks.
template <class Product>
inline float weigh_row(const AttentionStep& step, int row, const float* scores, char* weights) {
  const int visible = step.visible[row];
  Vec s[kStepVectors];
  Vec top = splat(kMinusInfinity);
  CAUDEX_UNROLL
  for (int v = 0; v < kStepVectors; ++v) {
    s[v] = mul(load(scores + v * kWidth), splat(step.scale));
    if (visible < kStepTokens) s[v] = first_lanes(s[v], visible - v * kWidth, splat(kMinusInfinity));
    top = max(top, s[v]);
  }
  const float before = step.maximum[row];
  const float step_maximum = largest(top);
  const float maximum = step_maximum > before ? step_maximum : before;
  float factor[kWidth];
  store(factor, exp2(splat(before - maximum)));
  step.maximum[row] = maximum;
  float* sum = step.sum + row * kSumLanes;
  constexpr int kSumVectors = kSumLanes / kWidth;
  Vec sums[kSumVectors];
  CAUDEX_UNROLL
  for (int v = 0; v < kSumVectors; ++v) sums[v] = mul(load(sum + v * kWidth), splat(factor[0]));
  CAUDEX_UNROLL
  for (int v = 0; v < kStepVectors; ++v) {
    const Vec weight = exp2(sub(s[v], splat(maximum)));
    sums[v % kSumVectors] = add(sums[v % kSumVectors], weight);
    Product::store_left(weights, v * kWidth, weight);
  }
  CAUDEX_UNROLL
  for (int v = 0; v < kSumVectors; ++v) store(sum + v * kWidth, sums[v]);
  return factor[0];
}

// Shrink the rows' outputs by their factors, then add the weighted values of the first `tokens` of the step.
template <class Product, int R, int V>
inline void add_values(const AttentionStep& step, int first, int column, const float (&factors)[R],
                       const char* weights, int tokens) {
  constexpr int kChunkSteps = kChunkTokens / Product::kDepth;
  constexpr std::size_t kWeightsRow = kStepTokens / Product::kDepth * Product::kLeftStep;
  float* output = step.output + first * step.padded_head_dim + column;
  Vec sums[R][V];
  CAUDEX_UNROLL
  for (int r = 0; r < R; ++r) {
    CAUDEX_UNROLL
    for (int v = 0; v < V; ++v) {
      sums[r][v] = mul(load(output + r * step.padded_head_dim + v * kWidth), splat(factors[r]));
    }
  }
  int steps = (tokens + Product::kDepth - 1) / Product::kDepth;
  for (int c = 0; steps > 0; ++c, steps -= kChunkSteps) {
    const char* values[V];
    CAUDEX_UNROLL
    for (int v = 0; v < V; ++v) values[v] = step.values[c] + (column + v * kWidth) * 4;
    multiply_tile<Product, R, V>(sums, weights + c * kChunkSteps * Product::kLeftStep, kWeightsRow, values,
                                 static_cast<std::size_t>(step.padded_head_dim) * 4,
                                 steps < kChunkSteps ? steps : kChunkSteps);
  }
  CAUDEX_UNROLL
  for (int r = 0; r < R; ++r) {
    CAUDEX_UNROLL
    for (int v = 0; v < V; ++v) store(output + r * step.padded_head_dim + v * kWidth, sums[r][v]);
  }
}

template <class Product, int R>
void attend_rows(const AttentionStep& step, int first) {
  constexpr int kWeightsRow = kStepTokens / Product::kDepth * Product::kLeftStep;
  int tokens = 0;
  for (int r = 0; r < R; ++r) tokens = step.visible[first + r] > tokens ? step.visible[first + r] : tokens;
  if (tokens == 0) return;
  alignas(64) float scores[R][kStepTokens];
  alignas(64) char weights[R * kWeightsRow];
  float factors[R];
  score_rows<Product, R>(step, first, scores);
  for (int r = 0; r < R; ++r) {
    if (step.visible[first + r] > 0) {
      factors[r] = weigh_row<Product>(step, first + r, scores[r], weights + r * kWeightsRow);
    } else {
      __builtin_memset(weights + r * kWeightsRow, 0, kWeightsRow);
      factors[r] = 1.0f;
    }
  }
  int column = 0;
  for (; column + kAttentionVectors * kWidth <= step.padded_head_dim; column += kAttentionVectors * kWidth) {
    add_values<Product, R, kAttentionVectors>(step, first, column, factors, weights, tokens);
  }
  for (; column < step.padded_head_dim; column += kWidth) {
    add_values<Product, R, 1>(step, first, column, factors, weights, tokens);
  }
}

// The remaining `rows` < R rows of a step, by the instance compiled for that number.
template <class Product, int R>
void attend_rest(const AttentionStep& step, int first, int rows) {
  if constexpr (R > 1) {
    if (rows < R) return attend_rest<Product, R - 1>(step, first, rows);
  }
  attend_rows<Product, R>(step, first);
}

template <class Product>
void attend_step(const AttentionStep& step) {
  int first = 0;
  for (; first + kAttentionRows <= step.rows; first += kAttentionRows) {
    attend_rows<Product, kAttentionRows>(step, first);
  }
  if (first < step.rows) attend_rest<Product, kAttentionRows>(step, first, step.rows - first);
}

void fold_partition(float* total_maximum, float* total_sum, float* total_output, const float* maximum,
                    const float* sum, const float* output, int padded_head_dim) {
  if (*maximum == kMinusInfinity) return;
  const float top = *maximum > *total_maximum ? *maximum : *total_maximum;
  const Vec total_factor = exp2(splat(*total_maximum - top));
  const Vec factor = exp2(splat(*maximum - top));
  *total_maximum = top;
  for (int i = 0; i < kSumLanes; i += kWidth) {
    store(total_sum + i, multiply_add(load(sum + i), factor, mul(load(total_sum + i), total_factor)));
  }
  for (int i = 0; i < padded_head_dim; i += kWidth) {
    store(total_output + i, multiply_add(load(output + i), factor, mul(load(total_output + i), total_factor)));
  }
}

template <class T>
void finish_row(T* target, const float* sum, const float* output, int head_dim) {
  const Vec total = splat(sum_lanes(sum));
  for (int i = 0; i < head_dim; i += kWidth) store_first(target + i, div(load(output + i), total), head_dim - i);
}

}  // namespace
}  // namespace caudex::kernels
