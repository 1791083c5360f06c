#include "cache/parity/vllm_cache.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace caudex::parity {

VllmCache::VllmCache(std::uint32_t num_blocks, std::uint32_t block_size)
    : block_size_(block_size), hasher_(make_hasher("fold128", random_secret())), blocks_(num_blocks) {
  for (std::uint32_t b = 1; b < num_blocks; ++b) insert_after(blocks_[0].previous, static_cast<BlockId>(b));
}

Position VllmCache::begin(VllmRequest& request, const Token* tokens, std::size_t count) {
  if (count == 0) throw std::invalid_argument("a request needs at least one token, got none");
  request = VllmRequest{};
  request.tokens.assign(tokens, tokens + count);
  request.running = true;
  compute_keys(request);
  const std::size_t limit = (count - 1) / block_size_;
  for (std::size_t i = 0; i < limit; ++i) {
    auto found = registered_.find(request.keys[i]);
    if (found == registered_.end()) break;
    request.hits.push_back(found->second.front());
  }
  return static_cast<Position>(request.hits.size()) * block_size_;
}

void VllmCache::allocate(VllmRequest& request, std::size_t num_tokens) {
  const std::size_t wanted = (num_tokens + block_size_ - 1) / block_size_;
  const std::size_t held = request.blocks.size() + request.hits.size();
  const std::size_t fresh = wanted > held ? wanted - held : 0;
  const auto queued = std::count_if(request.hits.begin(), request.hits.end(),
                                    [&](BlockId block) { return blocks_[block].references == 0; });
  if (fresh + static_cast<std::size_t>(queued) > num_free_) {
    throw OutOfBlocks("need " + std::to_string(fresh) + " more blocks, and of " + std::to_string(num_free_) +
                      " free ones the request's own hits take " + std::to_string(queued));
  }
  request.num_registered += static_cast<std::uint32_t>(request.hits.size());
  for (BlockId block : request.hits) {
    if (blocks_[block].references++ == 0) unlink(block);
    request.blocks.push_back(block);
  }
  request.hits.clear();
  for (std::size_t i = 0; i < fresh; ++i) request.blocks.push_back(take());

  const std::size_t full = std::min(num_tokens, request.tokens.size()) / block_size_;
  for (std::uint32_t& i = request.num_registered; i < full; ++i) {
    Block& block = blocks_[request.blocks[i]];
    block.is_registered = true;
    block.key = request.keys[i];
    registered_[block.key].push_back(request.blocks[i]);
  }
}

void VllmCache::append(VllmRequest& request, const Token* tokens, std::size_t count) {
  request.tokens.insert(request.tokens.end(), tokens, tokens + count);
  compute_keys(request);
}

void VllmCache::release(VllmRequest& request) {
  BlockId front = 0;  // unregistered blocks go to the front, in the order in which they are freed
  for (auto block = request.blocks.rbegin(); block != request.blocks.rend(); ++block) {
    if (--blocks_[*block].references > 0) continue;
    if (blocks_[*block].is_registered) continue;
    insert_after(front, *block);
    front = *block;
  }
  for (auto block = request.blocks.rbegin(); block != request.blocks.rend(); ++block) {
    if (blocks_[*block].references == 0 && !blocks_[*block].is_queued) insert_after(blocks_[0].previous, *block);
  }
  request = VllmRequest{};
}

bool VllmCache::reset() {
  if (num_free_ + 1 < blocks_.size()) return false;
  for (Block& block : blocks_) block.is_registered = false;
  registered_.clear();
  return true;
}

std::vector<BlockId> VllmCache::eviction_order() const {
  std::vector<BlockId> order;
  order.reserve(num_free_);
  for (BlockId block = blocks_[0].next; block != 0; block = blocks_[block].next) order.push_back(block);
  return order;
}

void VllmCache::compute_keys(VllmRequest& request) {
  while ((request.keys.size() + 1) * block_size_ <= request.tokens.size()) {
    Key key{};
    if (!request.keys.empty()) key = request.keys.back();
    auto* bytes = reinterpret_cast<std::uint8_t*>(key.data());
    hasher_->chain(bytes, request.tokens.data() + request.keys.size() * block_size_, block_size_, bytes);
    request.keys.push_back(key);
  }
}

BlockId VllmCache::take() {
  const BlockId block = blocks_[0].next;
  unlink(block);
  if (blocks_[block].is_registered) forget(block);
  blocks_[block].references = 1;
  return block;
}

void VllmCache::forget(BlockId block) {
  auto found = registered_.find(blocks_[block].key);
  std::vector<BlockId>& equal = found->second;
  equal.erase(std::find(equal.begin(), equal.end(), block));
  if (equal.empty()) registered_.erase(found);
  blocks_[block].is_registered = false;
  ++num_evicted_;
}

void VllmCache::insert_after(BlockId place, BlockId block) {
  const BlockId next = blocks_[place].next;
  blocks_[block].previous = place;
  blocks_[block].next = next;
  blocks_[block].is_queued = true;
  blocks_[place].next = block;
  blocks_[next].previous = block;
  ++num_free_;
}

void VllmCache::unlink(BlockId block) {
  blocks_[blocks_[block].previous].next = blocks_[block].next;
  blocks_[blocks_[block].next].previous = blocks_[block].previous;
  blocks_[block].is_queued = false;
  --num_free_;
}

}  // namespace caudex::parity
