// A pool that changes its size while in use: the part of PrefixCache that gives blocks other numbers.
#include <algorithm>

#include "cache/prefix_cache.hpp"

namespace caudex {

std::vector<BlockCopy> PrefixCache::resize(std::uint32_t num_blocks) {
  if (num_pinned() > num_blocks) {
    throw OutOfBlocks("cannot shrink the pool to " + std::to_string(num_blocks) + " blocks: " +
                      std::to_string(num_pinned()) + " are pinned");
  }
  const std::uint32_t in_use = pool_.num_blocks() - pool_.num_free();
  std::vector<BlockId> excess(in_use > num_blocks ? in_use - num_blocks : 0);
  for (std::size_t done = 0; done < excess.size();) {
    done += evict(static_cast<std::uint32_t>(excess.size() - done), excess.data() + done);
  }
  for (BlockId block : excess) pool_.give(block);
  return move_down(num_blocks, num_blocks);
}

std::vector<BlockCopy> PrefixCache::compact() {
  return move_down(pool_.num_blocks(), pool_.num_blocks() - pool_.num_free());
}

// Moves every block in use from `limit` on to a free place below, and makes the pool that large.
std::vector<BlockCopy> PrefixCache::move_down(std::uint32_t num_blocks, std::uint32_t limit) {
  const std::uint32_t before = pool_.num_blocks();
  std::vector<std::uint8_t> used(std::max(before, num_blocks), 0);
  std::fill(used.begin(), used.begin() + before, 1);
  pool_.for_each_free([&](BlockId block) { used[block] = 0; });
  std::vector<BlockId> renamed(before);
  for (std::uint32_t b = 0; b < before; ++b) renamed[b] = static_cast<BlockId>(b);

  std::vector<BlockCopy> copies = pending_copies_;
  std::uint32_t hole = 0;
  for (std::uint32_t b = limit; b < before; ++b) {
    if (!used[b]) continue;
    while (used[hole]) ++hole;
    renamed[b] = static_cast<BlockId>(hole);
    copies.push_back({static_cast<BlockId>(b), static_cast<BlockId>(hole), block_size()});
    pool_.copy(static_cast<BlockId>(b), static_cast<BlockId>(hole));
    used[hole] = 1;
    used[b] = 0;
  }
  pool_.resize(num_blocks, used);
  pending_copies_.clear();
  tree_.rename(renamed);
  for (Sequence* sequence = running_; sequence != nullptr; sequence = sequence->next) {
    for (BlockId& block : sequence->table) block = renamed[block];
    if (sequence->source != kNoNode) sequence->source_block = renamed[sequence->source_block];
  }
  return copies;
}

}  // namespace caudex
