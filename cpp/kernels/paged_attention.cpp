#include "kernels/paged_attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace caudex::kernels {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

// Of a query of zeros, whose scores shall still be comparable with the minus infinity of what is masked.
constexpr float kLeastScale = 1e-30f;

constexpr int kFetchingRows = 24;

}  // namespace

struct PagedAttention::Call {
  int layer;
  HeadRows query;
  char* output;
  const Batch& batch;
  const AttentionPlan& plan;
  int group_size;
  float scale;
};

// Row order within a tile: member, then query, then head of the group.
struct PagedAttention::RowStates {
  float* maximum;
  float* sum;
  float* output;
  int rows;
};

PagedAttention::PagedAttention(const KvPool& pool, const KernelTable& kernels, ThreadPool& threads)
    : pool_(pool), kernels_(kernels), threads_(threads), scratch_(threads.num_threads()) {}

std::size_t PagedAttention::query_row_bytes() const {
  const KvLayout& layout = pool_.layout();
  const std::size_t steps = layout.key_steps;
  if (layout.kv_dtype == DType::kInt8) return steps * 4 + sizeof(QuantizedRow);
  return layout.dtype == DType::kFloat32 ? steps * 4 : steps * 2 * kernels_.bf16_left_element_size;
}

std::size_t PagedAttention::state_row_bytes() const {
  return (1 + kSumLanes + pool_.layout().padded_head_dim) * sizeof(float);
}

// [rows][padded_head_dim] outputs, [rows][16] sums, [rows] maxima.
PagedAttention::RowStates PagedAttention::states_at(char* memory, int rows) const {
  float* output = reinterpret_cast<float*>(memory);
  float* sum = output + static_cast<std::size_t>(rows) * pool_.layout().padded_head_dim;
  return {sum + static_cast<std::size_t>(rows) * kSumLanes, sum, output, rows};
}

char* PagedAttention::partial_states(const Call& call, const AttentionTile& tile, int kv_head, int partition) {
  const int rows = tile.num_queries * call.group_size;
  const std::size_t first_row = kv_head * call.plan.partial_rows() + tile.partials;
  return partials_.data() + (first_row + static_cast<std::size_t>(partition) * rows) * state_row_bytes();
}

void PagedAttention::run(int layer, HeadRows query, char* output, const Batch& batch, const AttentionPlan& plan,
                         int group_size, float scale) {
  const Call call{layer, query, output, batch, plan, group_size, scale * kLog2E};
  const int heads = pool_.layout().num_kv_heads;
  partials_.reserve(plan.partial_rows() * heads * state_row_bytes());
  threads_.run(static_cast<int>(plan.items().size()) * heads, [&](int item, int thread) {
    attend_item(call, plan.items()[item / heads], item % heads, scratch_[thread]);
  });
  threads_.run(static_cast<int>(plan.split_tiles().size()) * heads, [&](int item, int) {
    fold_split_tile(call, plan.tiles()[plan.split_tiles()[item / heads]], item % heads);
  });
}

void PagedAttention::load_query(const Call& call, const AttentionTile& tile, int kv_head, char* target) const {
  const KvLayout& layout = pool_.layout();
  const std::size_t element = element_size(layout.dtype);
  for (const TileMember& member : tile.members) {
    const int first_row = call.batch.sequences()[member.sequence].query_start + member.first_query;
    for (int row = first_row; row < first_row + member.num_queries; ++row) {
      for (int g = 0; g < call.group_size; ++g, target += query_row_bytes()) {
        const int head = kv_head * call.group_size + g;
        const char* source = call.query.data + (row * call.query.row_stride + head * call.query.head_stride) * element;
        if (layout.kv_dtype == DType::kInt8) {
          quantize_query(target, source, call.scale);
        } else if (layout.dtype == DType::kFloat32) {
          std::memcpy(target, source, layout.row_bytes());
        } else {
          kernels_.load_left_bf16(target, reinterpret_cast<const bf16*>(source), layout.head_dim,
                                  layout.key_steps * 2);
        }
      }
    }
  }
}

void PagedAttention::quantize_query(char* target, const char* source, float scale) const {
  const KvLayout& layout = pool_.layout();
  auto* values = reinterpret_cast<std::int8_t*>(target);
  QuantizedRow row =
      layout.dtype == DType::kFloat32
          ? kernels_.quantize_hadamard_f32(values, reinterpret_cast<const float*>(source), layout.head_dim)
          : kernels_.quantize_hadamard_bf16(values, reinterpret_cast<const bf16*>(source), layout.head_dim);
  row.scale *= scale / static_cast<float>(layout.head_dim & -layout.head_dim);
  if (row.scale < kLeastScale) row.scale = kLeastScale;
  std::memcpy(target + layout.key_steps * 4, &row, sizeof(row));
}

void PagedAttention::attend_item(const Call& call, const AttentionItem& item, int kv_head, Scratch& scratch) {
  const AttentionTile& tile = call.plan.tiles()[item.tile];
  const int rows = tile.num_queries * call.group_size;
  char* query = scratch.query.reserve(rows * query_row_bytes());
  load_query(call, tile, kv_head, query);
  if (tile.split) {
    char* memory = partial_states(call, tile, kv_head, item.first_partition);
    return attend_partition(call, tile, item.first_partition, kv_head, states_at(memory, rows), query, scratch);
  }
  char* memory = scratch.states.reserve(2 * rows * state_row_bytes());
  const RowStates total = states_at(memory, rows);
  const RowStates part = states_at(memory + rows * state_row_bytes(), rows);
  attend_partition(call, tile, 0, kv_head, total, query, scratch);
  for (int p = 1; p < tile.num_partitions(); ++p) {
    attend_partition(call, tile, p, kv_head, part, query, scratch);
    fold_rows(total, part);
  }
  finish_rows(call, tile, kv_head, total);
}

void PagedAttention::attend_partition(const Call& call, const AttentionTile& tile, int partition, int kv_head,
                                      RowStates states, const char* query, Scratch& scratch) const {
  std::fill_n(states.maximum, states.rows, -std::numeric_limits<float>::infinity());
  std::fill_n(states.sum, states.rows * kSumLanes, 0.0f);
  std::fill_n(states.output, static_cast<std::size_t>(states.rows) * pool_.layout().padded_head_dim, 0.0f);
  for (const TileRun& run : tile.partitions[partition]) {
    attend_run(call, tile, run, kv_head, states, query, scratch);
  }
}

void PagedAttention::attend_run(const Call& call, const AttentionTile& tile, const TileRun& run, int kv_head,
                                RowStates states, const char* query, Scratch& scratch) const {
  const KvLayout& layout = pool_.layout();
  const auto attend_step = layout.kv_dtype == DType::kInt8      ? kernels_.attend_step_int8
                           : layout.kv_dtype == DType::kFloat32 ? kernels_.attend_step_f32
                                                                : kernels_.attend_step_bf16;
  int first_row = 0;
  for (int m = 0; m < run.first_member; ++m) first_row += tile.members[m].num_queries * call.group_size;
  int* visible = reinterpret_cast<int*>(scratch.visible.reserve(states.rows * sizeof(int)));
  char* copies = scratch.step.reserve(kStepChunks * (layout.key_chunk_bytes + layout.value_chunk_bytes));
  AttentionStep step{};
  step.visible = visible;
  step.query = query + first_row * query_row_bytes();
  step.query_row = query_row_bytes();
  step.key_steps = layout.key_steps;
  step.padded_head_dim = layout.padded_head_dim;
  step.scale = call.scale;
  step.maximum = states.maximum + first_row;
  step.sum = states.sum + first_row * kSumLanes;
  step.output = states.output + static_cast<std::size_t>(first_row) * layout.padded_head_dim;
  const BatchSequence& sequence = call.batch.sequences()[tile.members[run.first_member].sequence];
  for (int token = run.first_token; token < run.end_token; token += kStepTokens) {
    int tokens = 0;
    step.rows = 0;
    for (int m = run.first_member; m < run.end_member; ++m) {
      const TileMember& member = tile.members[m];
      const int position = call.batch.sequences()[member.sequence].first_position() + member.first_query;
      for (int q = 0; q < member.num_queries; ++q) {
        const int sees = std::clamp(position + q + 1 - token, 0, kStepTokens);
        tokens = std::max(tokens, sees);
        for (int g = 0; g < call.group_size; ++g) visible[step.rows++] = sees;
      }
    }
    point_to_step(step, call, sequence, kv_head, token, tokens, copies);
    point_to_next(step, call, sequence, kv_head, token + kStepTokens, run.end_token);
    attend_step(step);
  }
}

PagedAttention::Chunk PagedAttention::chunk_at(const Call& call, const BatchSequence& sequence, int kv_head,
                                               int token) const {
  const KvLayout& layout = pool_.layout();
  const char* head = pool_.head(call.layer, sequence.blocks[token / layout.block_size], kv_head);
  const int chunk = token % layout.block_size / kChunkTokens;
  return {head + chunk * layout.key_chunk_bytes, head + layout.keys_bytes + chunk * layout.value_chunk_bytes};
}

// Point the step at the chunks of the tokens [first_token, first_token + num_tokens), in the pool where they lie in
// chunks there, else in `copies`. A chunk whose last value pair holds one token past the end is copied too, and what
// lies there zeroed: it may be left over from another sequence, and even a weight of 0 would pass a NaN on.
void PagedAttention::point_to_step(AttentionStep& step, const Call& call, const BatchSequence& sequence, int kv_head,
                                   int first_token, int num_tokens, char* copies) const {
  const KvLayout& layout = pool_.layout();
  for (int c = 0; c < kStepChunks; ++c) {
    const int token = first_token + c * kChunkTokens;
    const int tokens = std::min(kChunkTokens, num_tokens - c * kChunkTokens);
    if (tokens <= 0) {
      // Scores of these tokens are masked, their values not read: any mapped keys will do.
      step.keys[c] = step.keys[0];
      step.values[c] = step.values[0];
      continue;
    }
    char* keys = copies + c * (layout.key_chunk_bytes + layout.value_chunk_bytes);
    char* values = keys + layout.key_chunk_bytes;
    if (!layout.chunked) {
      copy_rows_to_chunk(call, sequence, kv_head, token, tokens, keys, values);
      step.keys[c] = keys;
      step.values[c] = values;
      continue;
    }
    const Chunk chunk = chunk_at(call, sequence, kv_head, token);
    step.keys[c] = chunk.keys;
    step.values[c] = chunk.values;
    if (layout.kv_dtype == DType::kBFloat16 && tokens % 2 == 1) {
      const std::size_t pair_bytes = static_cast<std::size_t>(layout.padded_head_dim) * 4;
      std::memcpy(values, step.values[c], (tokens + 1) / 2 * pair_bytes);
      bf16* last = reinterpret_cast<bf16*>(values + tokens / 2 * pair_bytes);
      for (int i = 0; i < layout.padded_head_dim; ++i) last[2 * i + 1] = 0;
      step.values[c] = values;
    }
  }
}

// Keys and values that few rows use are waited for; while many rows use a step's, the next come by themselves.
void PagedAttention::point_to_next(AttentionStep& step, const Call& call, const BatchSequence& sequence, int kv_head,
                                   int first_token, int end_token) const {
  // A run may end where another of its tile's sequences does, beyond this one's blocks.
  const int last = std::min(end_token, sequence.context_len);
  for (int c = 0; c < kStepChunks; ++c) {
    const int token = first_token + c * kChunkTokens;
    const bool wanted = token < last && pool_.layout().chunked && step.rows <= kFetchingRows;
    const Chunk chunk = wanted ? chunk_at(call, sequence, kv_head, token) : Chunk{};
    step.next_keys[c] = chunk.keys;
    step.next_values[c] = chunk.values;
  }
}

void PagedAttention::copy_rows_to_chunk(const Call& call, const BatchSequence& sequence, int kv_head,
                                        int first_token, int num_tokens, char* keys, char* values) const {
  const KvLayout& layout = pool_.layout();
  std::memset(keys, 0, layout.key_chunk_bytes + layout.value_chunk_bytes);
  for (int t = 0; t < num_tokens; ++t) {
    const int token = first_token + t;
    const char* head = pool_.head(call.layer, sequence.blocks[token / layout.block_size], kv_head);
    const char* key = head + token % layout.block_size * layout.kept_row_bytes();
    layout.store_in_chunk(keys, values, t, key, key + layout.keys_bytes);
  }
}

void PagedAttention::fold_split_tile(const Call& call, const AttentionTile& tile, int kv_head) {
  const int rows = tile.num_queries * call.group_size;
  const RowStates total = states_at(partial_states(call, tile, kv_head, 0), rows);
  for (int p = 1; p < tile.num_partitions(); ++p) {
    fold_rows(total, states_at(partial_states(call, tile, kv_head, p), rows));
  }
  finish_rows(call, tile, kv_head, total);
}

void PagedAttention::fold_rows(const RowStates& total, const RowStates& part) const {
  const int stride = pool_.layout().padded_head_dim;
  for (int r = 0; r < total.rows; ++r) {
    kernels_.fold_partition(total.maximum + r, total.sum + r * kSumLanes, total.output + r * stride,
                            part.maximum + r, part.sum + r * kSumLanes, part.output + r * stride, stride);
  }
}

void PagedAttention::finish_rows(const Call& call, const AttentionTile& tile, int kv_head, RowStates states) const {
  const KvLayout& layout = pool_.layout();
  const std::size_t row_bytes = static_cast<std::size_t>(layout.num_kv_heads) * call.group_size * layout.row_bytes();
  int r = 0;
  for (const TileMember& member : tile.members) {
    const int first_row = call.batch.sequences()[member.sequence].query_start + member.first_query;
    for (int row = first_row; row < first_row + member.num_queries; ++row) {
      for (int g = 0; g < call.group_size; ++g, ++r) {
        char* target = call.output + row * row_bytes + (kv_head * call.group_size + g) * layout.row_bytes();
        const float* sum = states.sum + r * kSumLanes;
        const float* output = states.output + static_cast<std::size_t>(r) * layout.padded_head_dim;
        if (layout.dtype == DType::kFloat32) {
          kernels_.finish_row_f32(reinterpret_cast<float*>(target), sum, output, layout.head_dim);
        } else {
          kernels_.finish_row_bf16(reinterpret_cast<bf16*>(target), sum, output, layout.head_dim);
        }
      }
    }
  }
}

}  // namespace caudex::kernels
