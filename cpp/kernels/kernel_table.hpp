#pragma once

#include "kernels/dtype.hpp"

namespace caudex::kernels {

// Keys of 16 tokens lie side by side (one AVX-512 register of scores); a softmax step takes four such chunks.
constexpr int kChunkTokens = 16;
constexpr int kStepChunks = 4;
constexpr int kStepTokens = kChunkTokens * kStepChunks;

// Lanes of the running softmax sum: lane i adds the tokens whose position is i modulo 16, whatever the vector width.
constexpr int kSumLanes = 16;

// Columns of a packed weight panel, and the most rows any instruction set multiplies in one pass over it.
constexpr int kPanelColumns = 32;

// One softmax step: `rows` queries of one KV head against 64 consecutive tokens, folded into each row's running
// state (maximum, sum by lane, unnormalised output). `visible[r]` of the 64 tokens take part for row r, 0 to 64;
// a row that sees none keeps its state to the bit. Values of tokens beyond every row's sight are never read, except
// that a bfloat16 value is read with its pair's first token.
struct AttentionStep {
  const char* keys[kStepChunks];    // each [head_dim / depth][16 tokens][depth]; see KvLayout
  const char* values[kStepChunks];  // each [16 / depth tokens][padded_head_dim][depth]
  // The next step's chunks, fetched into the cache meanwhile; null for nothing.
  const char* next_keys[kStepChunks];
  const char* next_values[kStepChunks];
  int rows;
  const int* visible;     // [rows]
  const char* query;      // [rows], left operands; see KernelTable::load_query
  std::size_t query_row;  // bytes from one row of `query` to the next
  int key_steps;          // head_dim / depth, rounded up
  int padded_head_dim;    // a multiple of 16
  float scale;            // of the scores, in units of log2(e); positive. In int8 each query brings its own
  float* maximum;         // [rows]
  float* sum;             // [rows][16]
  float* output;          // [rows][padded_head_dim]
};

// `rows` left operands times one panel of 32 packed columns: sums[r][c], for c in [0, 32).
struct PanelProduct {
  const char* left;
  std::size_t left_row;  // bytes from one row of `left` to the next
  int rows;
  const char* panel;
  int steps;
  float* sums;  // [rows][32]
  const float* scales = nullptr;  // of the panel's columns, if it is quantized
};

// bfloat16 weights in 12 bits, without loss. The upper byte of a weight (its sign and all but the last bit of its
// exponent) is one of 16 in nearly all of a trained matrix, so 4 bits name it; the few other weights are kept beside
// (`WeightPatch`) and put in their places. A pair of steps takes 192 bytes instead of 256:
//
//   64 lower bytes of the first step | 64 of the second | 32 pairs of codes of the first | 32 of the second
//
// A pair of codes is a byte: that of weight i of a step's first 32 in its lower half, of its last 32 in the upper.
constexpr int kCodedPairBytes = 6 * kPanelColumns;
constexpr int kUpperBytes = 16;

struct WeightPatch {
  std::uint32_t place;  // step * 64 + weight, in the order of the plain panel
  bf16 weight;
};

struct CodedPanel {
  const char* data;
  const char* upper_bytes;  // [16] by code
  const WeightPatch* patches;  // in ascending order of place
  int num_patches;
};

// Rows and weights in 8 bits. A row of inputs is cut into groups of 64, each with a scale of its own: the one large
// input of a row costs its 63 neighbours their precision, and no others. A column of weights has one scale.
//
//   sum over groups, ascending, of float(sum of values * weights) * group scale, and that times the column's scale
//
// The sums of a group are of integers, and exact; the float part is a product and a sum a group, each rounded. So every
// instruction set gives the same bits. Weights are stored plus 128, as bytes, which is what processors multiply with
// signed bytes; `offset` takes that out again. A panel: [groups][16 steps][32 columns][4 inputs].
constexpr int kGroupInputs = 64;
constexpr int kGroupSteps = kGroupInputs / 4;
constexpr int kWeightOffset = 128;
constexpr float kMostByte = 127.0f;

// Groups and columns whose largest magnitude is below this are taken for zeros.
constexpr float kLeastMagnitude = 1e-30f;

struct QuantizedGroup {
  std::int8_t values[kGroupInputs];
  float scale;          // of a value; not a number, or infinite, if an input is
  std::int32_t offset;  // -128 * (sum of values)
};

// A row quantized as a whole: what there is to know beside its values.
struct QuantizedRow {
  float scale;          // as of a group
  std::int32_t offset;
};

// Attention over keys and values in 8 bits, one scale for each token's key, another for its value, and one for a query.
// Keys and queries are Walsh-Hadamard transformed first (QuaRot: Ashkboos et al., 2024), which changes no product of two
// and spreads what stands out in a few dimensions over all of them:
//
//   score      float(sum of query * key) * key scale, and that times (query scale * step scale)
//   weight     2^(score - maximum) by a polynomial of degree 3
//   output     old output * factor + float(sum over the step of byte * value) * unit
//
// `byte` is a weight times its value's scale in units of 1/255 of the largest such in the step. Sums of integers are
// exact, each product and sum of floats is rounded, so every instruction set gives the same bits. A query, a left operand
// of attend_step_int8: 4 * key_steps values, then a QuantizedRow whose scale is positive and has the step's scale in it.
constexpr float kMostWeight = 255.0f;
constexpr int kMaxHeadDim = 1024;

// The same weights in 4 bits. Every 32 inputs of a column share a scale and an offset, bytes both, and a weight's code, 0
// to 15, stands for the 8-bit weight
//
//   code * scale / 16, rounded down, + offset     (a byte: 128 is zero)
//
// so that products come to the same bits whether weights are expanded on the way, for few rows, or beforehand. Scales by
// group in small whole numbers, for the sake of products in integers, are QServe's (Lin et al. 2024); sixteenths make
// them fine enough for weights that were made of 4 bits. A panel: [groups of 32] of 8 steps and the parameters,
//
//   [8 steps][16 columns][2 words] | [16 columns][scale, scale of the 16th column after, offset, offset of that]
//
// where a word holds, from its lowest bits up, inputs 1 of the column and of the 16th after, and inputs 0 of both; the
// second word inputs 3 and 2.
constexpr int kScaledInputs = 32;
constexpr int kScaledSteps = kScaledInputs / 4;
constexpr int kFourBitStepBytes = 2 * kPanelColumns;
constexpr int kFourBitGroupBytes = kScaledSteps * kFourBitStepBytes + 2 * kPanelColumns;
constexpr int kCodes = 16;

// The inner loops, compiled once for each instruction set. Every function computes an output element by the same
// sequence of operations wherever it stands in a batch, a row or a vector; that is what makes results independent of
// batching, chunking and caching, to the bit.
struct KernelTable {
  const char* name;

  // Bytes an element of the left operand takes, for a product whose right operand is bfloat16: 2 where the
  // processor multiplies bfloat16 pairs, else 4 (widened to float32 once). For float32 it is always 4.
  int bf16_left_element_size;

  // Write `count` elements of `source` as a left operand, zero-filled up to `padded_count`.
  void (*load_left_bf16)(char* target, const bf16* source, int count, int padded_count);

  void (*multiply_panel_f32)(const PanelProduct& product);
  void (*multiply_panel_bf16)(const PanelProduct& product);
  // The same for the panel and the one after it: sums[p][r][c]. Quicker with many rows.
  void (*multiply_two_panels_f32)(const PanelProduct& product);
  void (*multiply_two_panels_bf16)(const PanelProduct& product);

  // The product of `multiply_panel_bf16`, to the bit, with a coded panel in the place of `product.panel`; `plain` is room
  // for it decoded. Null, like `decode_panel`, where decoding would take longer than reading 16 bits a weight.
  void (*multiply_coded_panel)(const PanelProduct& product, const CodedPanel& panel, char* plain);
  void (*decode_panel)(char* target, const CodedPanel& panel, int steps);

  // Quantize `count` elements, zero-filled up to whole groups: scale = largest magnitude / 127.
  void (*quantize_f32)(QuantizedGroup* target, const float* source, int count);
  void (*quantize_bf16)(QuantizedGroup* target, const bf16* source, int count);

  // Quantize `count` elements with one scale; the target is zero-filled up to a multiple of 4.
  QuantizedRow (*quantize_row_f32)(std::int8_t* target, const float* source, int count);
  QuantizedRow (*quantize_row_bf16)(std::int8_t* target, const bf16* source, int count);

  // The same of the row's Walsh-Hadamard transform, not normalised, over groups of the largest power of two in `count`.
  QuantizedRow (*quantize_hadamard_f32)(std::int8_t* target, const float* source, int count);
  QuantizedRow (*quantize_hadamard_bf16)(std::int8_t* target, const bf16* source, int count);

  // Quantized rows times one quantized panel, or two. `product.left`: rows of QuantizedGroup.
  void (*multiply_quantized_panel)(const PanelProduct& product);
  void (*multiply_two_quantized_panels)(const PanelProduct& product);

  // The product of `multiply_quantized_panel`, to the bit, with a panel in 4 bits; `plain` is room for it in 8 bits.
  void (*multiply_four_bit_panel)(const PanelProduct& product, char* plain);

  // What becomes of a panel's sums, [rows][32]. `bias` (32, or null) is added first. `stride`: elements from one
  // row of the target to the next; `columns` of the 32 are stored.
  void (*store_f32)(float* target, std::size_t stride, const float* sums, const float* bias, int rows, int columns);
  void (*store_bf16)(bf16* target, std::size_t stride, const float* sums, const float* bias, int rows, int columns);
  // target += sums.
  void (*add_f32)(float* target, std::size_t stride, const float* sums, const float* bias, int rows, int columns);
  // The panel holds 16 columns of a gate and the same 16 of its linear part; `columns` of the 16 are stored.
  void (*swiglu_f32)(float* target, std::size_t stride, const float* sums, const float* bias, int rows, int columns);
  void (*swiglu_bf16)(bf16* target, std::size_t stride, const float* sums, const float* bias, int rows, int columns);

  // target = weight * x / sqrt(mean(x^2) + epsilon) over `count` elements; x and weight are zero up to the next
  // multiple of 16, and so much of the target is written.
  void (*rms_norm_f32)(float* target, const float* x, const float* weight, int count, float epsilon);
  void (*rms_norm_bf16)(bf16* target, const float* x, const float* weight, int count, float epsilon);

  // Rotate halves in place: (x[i], x[i + count / 2]) by the angle whose cosine and sine are cos[i] and sin[i].
  void (*rotate)(float* x, const float* cos, const float* sin, int count);

  void (*widen_bf16)(float* target, const bf16* source, int count);
  void (*round_to_bf16)(bf16* target, const float* source, int count);

  void (*attend_step_f32)(const AttentionStep& step);
  void (*attend_step_bf16)(const AttentionStep& step);
  void (*attend_step_int8)(const AttentionStep& step);

  // Fold one partition's state into the total of the partitions before it (a row each).
  void (*fold_partition)(float* total_maximum, float* total_sum, float* total_output, const float* maximum,
                         const float* sum, const float* output, int padded_head_dim);

  // Normalise one row's output by its sum and write `head_dim` elements.
  void (*finish_row_f32)(float* target, const float* sum, const float* output, int head_dim);
  void (*finish_row_bf16)(bf16* target, const float* sum, const float* output, int head_dim);
};

// The tables that this binary holds. A null pointer where the compiler's target has no such instructions.
const KernelTable* generic_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512_bf16_kernels();

}  // namespace caudex::kernels
