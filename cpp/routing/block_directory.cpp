#include "routing/block_directory.hpp"

#include <algorithm>

namespace caudex::routing {

BlockDirectory::BlockDirectory(std::size_t block_size) : block_size_(block_size) {}

void BlockDirectory::store(Worker worker, Key parent, const EngineHash* hashes, std::size_t num_blocks,
                           const std::int32_t* tokens) {
  if (worker >= by_hash_.size()) by_hash_.resize(worker + 1);
  const std::size_t block_bytes = block_size_ * sizeof(std::int32_t);
  Key key = parent;
  for (std::size_t i = 0; i < num_blocks; ++i) {
    chain_bytes(key, tokens + i * block_size_, block_bytes, block_bytes, &key);
    const auto [known, is_new] = by_hash_[worker].try_emplace(hashes[i], key);
    if (!is_new && known->second != key) drop_holder(known->second, worker);
    known->second = key;
    auto& holders = holders_[key];
    if (std::find(holders.begin(), holders.end(), worker) == holders.end()) holders.push_back(worker);
  }
}

bool BlockDirectory::find(Worker worker, EngineHash hash, Key* key) const {
  if (worker >= by_hash_.size()) return false;
  const auto found = by_hash_[worker].find(hash);
  if (found == by_hash_[worker].end()) return false;
  *key = found->second;
  return true;
}

void BlockDirectory::drop_holder(Key key, Worker worker) {
  const auto found = holders_.find(key);
  if (found == holders_.end()) return;
  auto& holders = found->second;
  holders.erase(std::remove(holders.begin(), holders.end(), worker), holders.end());
  if (holders.empty()) holders_.erase(found);
}

void BlockDirectory::remove(Worker worker, const EngineHash* hashes, std::size_t num_blocks) {
  if (worker >= by_hash_.size()) return;
  for (std::size_t i = 0; i < num_blocks; ++i) {
    const auto found = by_hash_[worker].find(hashes[i]);
    if (found == by_hash_[worker].end()) continue;
    drop_holder(found->second, worker);
    by_hash_[worker].erase(found);
  }
}

void BlockDirectory::clear(Worker worker) {
  if (worker >= by_hash_.size()) return;
  for (const auto& [hash, key] : by_hash_[worker]) drop_holder(key, worker);
  by_hash_[worker].clear();
}

void BlockDirectory::match(const Key* keys, std::size_t num_keys, std::int32_t* out, std::size_t num_workers) const {
  std::fill(out, out + num_workers, 0);
  for (std::size_t i = 0; i < num_keys; ++i) {
    const auto found = holders_.find(keys[i]);
    if (found == holders_.end()) return;
    bool any = false;
    for (const Worker worker : found->second) {
      if (worker >= num_workers || out[worker] != static_cast<std::int32_t>(i)) continue;
      out[worker] = static_cast<std::int32_t>(i + 1);
      any = true;
    }
    if (!any) return;
  }
}

std::size_t BlockDirectory::num_blocks(Worker worker) const {
  return worker < by_hash_.size() ? by_hash_[worker].size() : 0;
}

void BlockDirectory::held(std::int64_t* out, std::size_t num_workers) const {
  for (Worker worker = 0; worker < num_workers; ++worker) out[worker] = static_cast<std::int64_t>(num_blocks(worker));
}

}  // namespace caudex::routing
