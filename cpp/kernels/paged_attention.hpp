#pragma once

#include <vector>

#include "kernels/aligned_buffer.hpp"
#include "kernels/attention_plan.hpp"
#include "kernels/kv_pool.hpp"

namespace caudex::kernels {

// Causal attention of a batch's rows over the keys and values in a pool's blocks, read in place.
//
// A row's result is a function of its query and of the keys and values at its position and before, to the bit: not of
// the other rows, the chunking, the block table, the block size, or the number of threads.
class PagedAttention {
 public:
  PagedAttention(const KvPool& pool, const KernelTable& kernels, ThreadPool& threads);

  const KvPool& pool() const { return pool_; }
  const char* isa() const { return kernels_.name; }

  // query: [rows, num_kv_heads * group_size, head_dim] in the pool's type; output: the same shape, contiguous.
  // `scale` multiplies the scores. The rows' own keys and values must have been written to the pool.
  void run(int layer, HeadRows query, char* output, const Batch& batch, const AttentionPlan& plan, int group_size,
           float scale);

 private:
  struct Call;       // what all items of one call share
  struct RowStates;  // softmax states of a tile's rows
  struct Chunk {
    const char* keys = nullptr;
    const char* values = nullptr;
  };
  struct Scratch {
    AlignedBuffer query, states, visible, step;
  };

  void attend_item(const Call& call, const AttentionItem& item, int kv_head, Scratch& scratch);
  void attend_partition(const Call& call, const AttentionTile& tile, int partition, int kv_head, RowStates states,
                        const char* query, Scratch& scratch) const;
  void attend_run(const Call& call, const AttentionTile& tile, const TileRun& run, int kv_head, RowStates states,
                  const char* query, Scratch& scratch) const;
  void quantize_query(char* target, const char* source, float scale) const;
  void load_query(const Call& call, const AttentionTile& tile, int kv_head, char* target) const;
  void point_to_step(AttentionStep& step, const Call& call, const BatchSequence& sequence, int kv_head,
                     int first_token, int num_tokens, char* copies) const;
  void point_to_next(AttentionStep& step, const Call& call, const BatchSequence& sequence, int kv_head,
                     int first_token, int end_token) const;
  Chunk chunk_at(const Call& call, const BatchSequence& sequence, int kv_head, int token) const;
  void copy_rows_to_chunk(const Call& call, const BatchSequence& sequence, int kv_head, int first_token,
                          int num_tokens, char* keys, char* values) const;
  void fold_split_tile(const Call& call, const AttentionTile& tile, int kv_head);
  void fold_rows(const RowStates& total, const RowStates& part) const;
  void finish_rows(const Call& call, const AttentionTile& tile, int kv_head, RowStates states) const;

  RowStates states_at(char* memory, int rows) const;
  std::size_t state_row_bytes() const;
  char* partial_states(const Call& call, const AttentionTile& tile, int kv_head, int partition);
  std::size_t query_row_bytes() const;

  const KvPool& pool_;
  const KernelTable& kernels_;
  ThreadPool& threads_;
  std::vector<Scratch> scratch_;
  AlignedBuffer partials_;
};

}  // namespace caudex::kernels
