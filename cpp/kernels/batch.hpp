#pragma once

#include <cstdint>
#include <vector>

namespace caudex::kernels {

// A token slot of the KV pool.
struct RowSlot {
  std::int32_t block;
  std::int32_t offset;
};

// One sequence's part of a step: its `query_len` newest tokens are rows [query_start, query_start + query_len) of the
// batch, at positions [context_len - query_len, context_len) of the sequence.
struct BatchSequence {
  std::vector<std::int32_t> blocks;
  int query_start;
  int query_len;
  int context_len;

  int first_position() const { return context_len - query_len; }
};

// What one engine step computes: a packed row for every new token, of prefills, chunks and decodes alike. Checked when
// built, so that the kernels may trust it.
class Batch {
 public:
  // Throws std::invalid_argument, naming the sequence, if a query is empty, longer than its context, or if a block
  // table is too short for its context or names a block outside [0, num_blocks).
  Batch(std::vector<std::vector<std::int32_t>> block_tables, const std::vector<std::int32_t>& query_lens,
        const std::vector<std::int32_t>& context_lens, int block_size, int num_blocks);

  int num_rows() const { return static_cast<int>(slots_.size()); }
  int block_size() const { return block_size_; }
  int num_blocks() const { return num_blocks_; }
  const std::vector<BatchSequence>& sequences() const { return sequences_; }
  RowSlot slot(int row) const { return slots_[row]; }
  std::int32_t position(int row) const { return positions_[row]; }
  const std::vector<std::int32_t>& positions() const { return positions_; }

 private:
  void add_sequence(std::vector<std::int32_t> blocks, int query_len, int context_len);

  int block_size_;
  int num_blocks_;
  std::vector<BatchSequence> sequences_;
  std::vector<RowSlot> slots_;
  std::vector<std::int32_t> positions_;
};

}  // namespace caudex::kernels
