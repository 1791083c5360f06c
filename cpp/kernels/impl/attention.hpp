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

// Fetches the next step's chunks while this step's are used, line by line; `chunks[v]` is null for nothing.
template <int V>
struct ChunkPrefetch {
  const char* chunks[V];
  std::size_t step_bytes;
  void at_step(int step) const {
    CAUDEX_UNROLL
    for (int v = 0; v < V; ++v) {
      if (chunks[v]) __builtin_prefetch(chunks[v] + step * step_bytes, 0, 2);
    }
  }
};

// What becomes of a tile's sums where keys and values are kept as they came: nothing.
template <class P>
struct PlainScores {
  using Product = P;
  static Vec start(const AttentionStep&, int) { return zeros(); }
  static Vec score(const AttentionStep&, int, Vec sum) { return sum; }
};

template <class Scores, int R, bool kFetchNext>
inline void score_rows(const AttentionStep& step, int first, float (&scores)[R][kStepTokens]) {
  using Product = typename Scores::Product;
  constexpr int kPerChunk = kChunkTokens / kWidth;
  for (int v = 0; v < kStepVectors; v += kAttentionVectors) {
    const char* keys[kAttentionVectors];
    ChunkPrefetch<kAttentionVectors> next{{}, kChunkTokens * 4};
    typename Product::Sum sums[R][kAttentionVectors];
    CAUDEX_UNROLL
    for (int c = 0; c < kAttentionVectors; ++c) {
      keys[c] = key_vector(step, v + c);
      if ((v + c) % kPerChunk == 0) next.chunks[c] = step.next_keys[(v + c) / kPerChunk];
      CAUDEX_UNROLL
      for (int r = 0; r < R; ++r) sums[r][c] = Scores::start(step, first + r);
    }
    const char* query = step.query + first * step.query_row;
    if constexpr (kFetchNext) {
      multiply_tile<Product>(sums, query, step.query_row, keys, kChunkTokens * 4, step.key_steps, next);
    } else {
      multiply_tile<Product>(sums, query, step.query_row, keys, kChunkTokens * 4, step.key_steps, NoPrefetch{});
    }
    CAUDEX_UNROLL
    for (int r = 0; r < R; ++r) {
      CAUDEX_UNROLL
      for (int c = 0; c < kAttentionVectors; ++c) {
        store(scores[r] + (v + c) * kWidth, Scores::score(step, v + c, sums[r][c]));
      }
    }
  }
}

// A row's largest score; those of tokens that it does not see are set to minus infinity, in place.
inline float mask_row(float* scores, int visible) {
  Vec s[kStepVectors];
  CAUDEX_UNROLL
  for (int v = 0; v < kStepVectors; ++v) s[v] = load(scores + v * kWidth);
  if (visible < kStepTokens) {
    CAUDEX_UNROLL
    for (int v = 0; v < kStepVectors; ++v) {
      s[v] = first_lanes(s[v], visible - v * kWidth, splat(kMinusInfinity));
      store(scores + v * kWidth, s[v]);
    }
  }
  Vec top = s[0];
  CAUDEX_UNROLL
  for (int v = 1; v < kStepVectors; ++v) top = max(top, s[v]);
  return largest(top);
}

// Bring R rows' maxima up to date by their largest scores (scaled), all in one go: the factors by which their outputs and
// sums so far shrink are functions of few numbers and would wait for one another.
template <int R>
inline void raise_maxima(const AttentionStep& step, int first, const float (&tops)[R], float (&factors)[R]) {
  constexpr int kLanes = (R + kWidth - 1) / kWidth * kWidth;
  float before[kLanes] = {}, after[kLanes] = {}, shrunk[kLanes];
  CAUDEX_UNROLL
  for (int r = 0; r < R; ++r) {
    before[r] = step.maximum[first + r];
    after[r] = tops[r] > before[r] ? tops[r] : before[r];
  }
  for (int i = 0; i < kLanes; i += kWidth) {
    store(shrunk + i, portable_exp2(sub(load(before + i), load(after + i))));
  }
  CAUDEX_UNROLL
  for (int r = 0; r < R; ++r) {
    step.maximum[first + r] = after[r];
    factors[r] = after[r] > before[r] ? shrunk[r] : 1.0f;
  }
}

// Turn a row's scores into weights (left operands for the values) and bring its sum up to date.
template <class Product>
inline void weigh_row(const AttentionStep& step, int row, const float* scores, float factor, char* weights) {
  float* sum = step.sum + row * kSumLanes;
  constexpr int kSumVectors = kSumLanes / kWidth;
  Vec sums[kSumVectors];
  CAUDEX_UNROLL
  for (int v = 0; v < kSumVectors; ++v) sums[v] = mul(load(sum + v * kWidth), splat(factor));
  const Vec shift = splat(-step.maximum[row]);
  CAUDEX_UNROLL
  for (int v = 0; v < kStepVectors; ++v) {
    const Vec exponent = multiply_add(load(scores + v * kWidth), splat(step.scale), shift);
    const Vec weight = exp2<Product::kWeightDegree>(exponent);
    sums[v % kSumVectors] = add(sums[v % kSumVectors], weight);
    Product::store_left(weights, v * kWidth, weight);
  }
  CAUDEX_UNROLL
  for (int v = 0; v < kSumVectors; ++v) store(sum + v * kWidth, sums[v]);
}

// Add the weighted values of the first `tokens` of the step, in V vectors of columns.
template <class Product, int R, int V, bool kFetchNext>
inline __attribute__((always_inline)) void multiply_values(typename Product::Sum (&sums)[R][V],
                                                           const AttentionStep& step, int column, const char* weights,
                                                           int tokens) {
  constexpr int kChunkSteps = kChunkTokens / Product::kDepth;
  constexpr std::size_t kWeightsRow = kStepTokens / Product::kDepth * Product::kLeftStep;
  const std::size_t value_step = static_cast<std::size_t>(step.padded_head_dim) * 4;
  int steps = (tokens + Product::kDepth - 1) / Product::kDepth;
  for (int c = 0; steps > 0; ++c, steps -= kChunkSteps) {
    const char* values[V];
    CAUDEX_UNROLL
    for (int v = 0; v < V; ++v) values[v] = step.values[c] + (column + v * kWidth) * 4;
    const char* chunk_weights = weights + c * kChunkSteps * Product::kLeftStep;
    const int chunk_steps = steps < kChunkSteps ? steps : kChunkSteps;
    if constexpr (kFetchNext) {
      ChunkPrefetch<V> next{{}, value_step};
      CAUDEX_UNROLL
      for (int v = 0; v < V; ++v) {
        const bool starts_line = v * kWidth % 16 == 0;
        if (step.next_values[c] && starts_line) next.chunks[v] = step.next_values[c] + (column + v * kWidth) * 4;
      }
      multiply_tile<Product>(sums, chunk_weights, kWeightsRow, values, value_step, chunk_steps, next);
    } else {
      multiply_tile<Product>(sums, chunk_weights, kWeightsRow, values, value_step, chunk_steps, NoPrefetch{});
    }
  }
}

// Shrink the rows' outputs by their factors, then add the weighted values of the first `tokens` of the step.
template <class Product, int R, int V, bool kFetchNext>
inline void add_values(const AttentionStep& step, int first, int column, const float (&factors)[R],
                       const char* weights, int tokens) {
  float* output = step.output + first * step.padded_head_dim + column;
  Vec sums[R][V];
  CAUDEX_UNROLL
  for (int r = 0; r < R; ++r) {
    CAUDEX_UNROLL
    for (int v = 0; v < V; ++v) {
      sums[r][v] = mul(load(output + r * step.padded_head_dim + v * kWidth), splat(factors[r]));
    }
  }
  multiply_values<Product, R, V, kFetchNext>(sums, step, column, weights, tokens);
  CAUDEX_UNROLL
  for (int r = 0; r < R; ++r) {
    CAUDEX_UNROLL
    for (int v = 0; v < V; ++v) store(output + r * step.padded_head_dim + v * kWidth, sums[r][v]);
  }
}

// How many of the step's tokens any of R rows sees.
template <int R>
inline int tokens_seen(const AttentionStep& step, int first) {
  int tokens = 0;
  for (int r = 0; r < R; ++r) tokens = step.visible[first + r] > tokens ? step.visible[first + r] : tokens;
  return tokens;
}

template <class Product, int R, bool kFetchNext>
void attend_rows(const AttentionStep& step, int first) {
  constexpr int kWeightsRow = kStepTokens / Product::kDepth * Product::kLeftStep;
  const int tokens = tokens_seen<R>(step, first);
  if (tokens == 0) return;
  alignas(64) float scores[R][kStepTokens];
  alignas(64) char weights[R * kWeightsRow];
  float tops[R], factors[R];
  score_rows<PlainScores<Product>, R, kFetchNext>(step, first, scores);
  CAUDEX_UNROLL
  for (int r = 0; r < R; ++r) tops[r] = mask_row(scores[r], step.visible[first + r]) * step.scale;
  raise_maxima(step, first, tops, factors);
  for (int r = 0; r < R; ++r) {
    if (step.visible[first + r] > 0) {
      weigh_row<Product>(step, first + r, scores[r], factors[r], weights + r * kWeightsRow);
    } else {
      __builtin_memset(weights + r * kWeightsRow, 0, kWeightsRow);
    }
  }
  int column = 0;
  for (; column + kAttentionVectors * kWidth <= step.padded_head_dim; column += kAttentionVectors * kWidth) {
    add_values<Product, R, kAttentionVectors, kFetchNext>(step, first, column, factors, weights, tokens);
  }
  for (; column < step.padded_head_dim; column += kWidth) {
    add_values<Product, R, 1, kFetchNext>(step, first, column, factors, weights, tokens);
  }
}

template <class Product>
struct PlainAttention {
  template <int R, bool kFetchNext>
  static void attend(const AttentionStep& step, int first) {
    attend_rows<Product, R, kFetchNext>(step, first);
  }
};

// `rows` <= R rows of a step, by the instance compiled for that number.
template <class Attention, int R, bool kFetchNext>
void attend_some_rows(const AttentionStep& step, int first, int rows) {
  if constexpr (R > 1) {
    if (rows < R) return attend_some_rows<Attention, R - 1, kFetchNext>(step, first, rows);
  }
  Attention::template attend<R, kFetchNext>(step, first);
}

template <class Attention>
void attend_step(const AttentionStep& step) {
  for (int first = 0; first < step.rows; first += kAttentionRows) {
    const int rows = step.rows - first < kAttentionRows ? step.rows - first : kAttentionRows;
    if (first == 0 && step.next_keys[0]) {
      attend_some_rows<Attention, kAttentionRows, true>(step, first, rows);
    } else {
      attend_some_rows<Attention, kAttentionRows, false>(step, first, rows);
    }
  }
}

void fold_partition(float* total_maximum, float* total_sum, float* total_output, const float* maximum,
                    const float* sum, const float* output, int padded_head_dim) {
  if (*maximum == kMinusInfinity) return;
  const float top = *maximum > *total_maximum ? *maximum : *total_maximum;
  const Vec total_factor = portable_exp2(splat(*total_maximum - top));
  const Vec factor = portable_exp2(splat(*maximum - top));
  *total_maximum = top;
  for (int i = 0; i < kSumLanes; i += kWidth) {
    store(total_sum + i, multiply_then_add(load(sum + i), factor, mul(load(total_sum + i), total_factor)));
  }
  for (int i = 0; i < padded_head_dim; i += kWidth) {
    store(total_output + i, multiply_then_add(load(output + i), factor, mul(load(total_output + i), total_factor)));
  }
}

template <class T>
void finish_row(T* target, const float* sum, const float* output, int head_dim) {
  const Vec total = splat(sum_lanes(sum));
  for (int i = 0; i < head_dim; i += kWidth) store_first(target + i, div(load(output + i), total), head_dim - i);
}

}  // namespace
}  // namespace caudex::kernels
