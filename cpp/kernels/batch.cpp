#include "kernels/batch.hpp"

#include <stdexcept>
#include <string>
#include <utility>

namespace caudex::kernels {

Batch::Batch(std::vector<std::vector<std::int32_t>> block_tables, const std::vector<std::int32_t>& query_lens,
             const std::vector<std::int32_t>& context_lens, int block_size, int num_blocks)
    : block_size_(block_size), num_blocks_(num_blocks) {
  if (block_tables.size() != query_lens.size() || block_tables.size() != context_lens.size()) {
    throw std::invalid_argument("a batch of " + std::to_string(block_tables.size()) + " block tables has " +
                                std::to_string(query_lens.size()) + " query lengths and " +
                                std::to_string(context_lens.size()) + " context lengths; expected one each");
  }
  sequences_.reserve(block_tables.size());
  for (std::size_t i = 0; i < block_tables.size(); ++i) {
    add_sequence(std::move(block_tables[i]), query_lens[i], context_lens[i]);
  }
}

void Batch::add_sequence(std::vector<std::int32_t> blocks, int query_len, int context_len) {
  const std::string name = "sequence " + std::to_string(sequences_.size()) + ": ";
  if (query_len < 1 || query_len > context_len) {
    throw std::invalid_argument(name + "query length " + std::to_string(query_len) +
                                " is not between 1 and its context length, " + std::to_string(context_len));
  }
  const std::size_t needed = (static_cast<std::size_t>(context_len) + block_size_ - 1) / block_size_;
  if (blocks.size() < needed) {
    throw std::invalid_argument(name + "a context of " + std::to_string(context_len) + " tokens needs " +
                                std::to_string(needed) + " blocks; its block table has " +
                                std::to_string(blocks.size()));
  }
  blocks.resize(needed);
  for (const std::int32_t block : blocks) {
    if (block < 0 || block >= num_blocks_) {
      throw std::invalid_argument(name + "block " + std::to_string(block) + " is outside the pool of " +
                                  std::to_string(num_blocks_));
    }
  }
  const int query_start = num_rows();
  for (int position = context_len - query_len; position < context_len; ++position) {
    positions_.push_back(position);
    slots_.push_back({blocks[position / block_size_], position % block_size_});
  }
  sequences_.push_back({std::move(blocks), query_start, query_len, context_len});
}

}  // namespace caudex::kernels
