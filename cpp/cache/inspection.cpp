// What PrefixCache tells of itself: counters, occupancy, explanations, and whether its invariants hold.
#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "cache/prefix_cache.hpp"

namespace caudex {
namespace {

constexpr std::size_t kShown = 8;  // tokens of a sibling that explain() tells

}  // namespace

Stats PrefixCache::stats() const {
  Stats sum = forgotten_;
  for (const Space& space : spaces_) sum += space.stats;
  return sum;
}

Stats PrefixCache::stats(std::string_view name) const {
  Stats sum;
  for (const Space& space : spaces_) {
    if (space.is_open() && space.name == name) sum += space.stats;
  }
  return sum;
}

Occupancy PrefixCache::occupancy() const {
  Occupancy sum;
  for (const Space& space : spaces_) {
    if (space.is_open()) sum += tree_.occupancy(space.root);
  }
  for (const Sequence* sequence = running_; sequence != nullptr; sequence = sequence->next) sum += private_blocks(*sequence);
  return sum;
}

Occupancy PrefixCache::occupancy(std::string_view name) const {
  Occupancy sum;
  for (const Space& space : spaces_) {
    if (space.is_open() && space.name == name) sum += tree_.occupancy(space.root);
  }
  for (const Sequence* sequence = running_; sequence != nullptr; sequence = sequence->next) {
    if (spaces_[sequence->space].name == name) sum += private_blocks(*sequence);
  }
  return sum;
}

// What a running request holds beside the tree.
Occupancy PrefixCache::private_blocks(const Sequence& sequence) const {
  Occupancy sum;
  const std::uint32_t in_tree = blocks_for(tree_.nodes()[sequence.anchor].end);
  const std::size_t slots = sequence.table.size() * block_size();
  sum.pinned_blocks = sequence.table.size() - in_tree;
  if (sum.pinned_blocks > 0) {
    sum.unused_slots = slots - std::max<std::size_t>(std::min(sequence.tokens.size(), slots), in_tree * block_size());
  }
  return sum;
}

std::vector<std::string> PrefixCache::spaces() const {
  std::vector<std::string> names;
  std::unordered_set<std::string_view> known;  // several tenants' trees have one name
  for (const Space& space : spaces_) {
    if (space.is_open() && known.insert(space.name).second) names.push_back(space.name);
  }
  return names;
}

Explanation PrefixCache::explain(const Prompt& prompt) const {
  Explanation told;
  std::vector<Token> copy;
  const Token* tokens = readable_tokens(prompt, copy);
  told.num_tokens = static_cast<Position>(prompt.count);
  told.num_cached = count_cached(prompt);
  told.policy = options_.policy;
  if (prompt.count == 0 || told.num_cached + 1 == prompt.count) {
    told.reason = MissReason::kComplete;
    return told;
  }
  explain_divergence(told, prompt, tokens);
  explain_other_spaces(told, prompt, tokens);
  explain_eviction(told, prompt, tokens);
  return told;
}

// A later look that finds something overrules an earlier one: the most telling comes last.
void PrefixCache::explain_divergence(Explanation& told, const Prompt& prompt, const Token* tokens) const {
  const Space* space = find_space(prompt);
  if (space == nullptr) return;
  const Tenant viewer = find_tenant(prompt.tenant);
  const Position limit = told.num_tokens - 1;
  const Walk walk = tree_.walk(space->root, tokens, limit, viewer);
  told.expected = tree_.continuation(walk, viewer, kShown);
  if (told.expected.empty()) return;
  Position agreed = 0;
  while (agreed < told.expected.size() && walk.end + agreed < limit && told.expected[agreed] == tokens[walk.end + agreed]) {
    ++agreed;
  }
  told.diverged_at = walk.end + agreed;
  told.expected.erase(told.expected.begin(), told.expected.begin() + agreed);
  if (walk.end + agreed > 0) told.reason = agreed > 0 ? MissReason::kBelowBlock : MissReason::kDiverged;
}

void PrefixCache::explain_other_spaces(Explanation& told, const Prompt& prompt, const Token* tokens) const {
  const Space* own = find_space(prompt);
  for (const Space& space : spaces_) {
    if (!space.is_open()) continue;
    const Position end = tree_.walk(space.root, tokens, told.num_tokens - 1, kOperator).end;
    if (end <= std::max(told.num_cached, told.num_cached_there)) continue;
    told.reason = MissReason::kOtherNamespace;
    told.num_cached_there = end;
    told.other_space = &space == own ? std::string(prompt.space) + " (another tenant)" : space.name;
  }
}

void PrefixCache::explain_eviction(Explanation& told, const Prompt& prompt, const Token* tokens) const {
  std::uint8_t key[kMaxKeyBytes];
  hasher_->root(tree_name(prompt), key);
  std::vector<std::uint64_t> missing;  // fingerprints of the blocks that are not cached
  for (Position end = block_size(); end < told.num_tokens; end += block_size()) {
    hasher_->chain(key, tokens + end - block_size(), block_size(), key);
    if (end <= told.num_cached) continue;
    missing.emplace_back();
    std::memcpy(&missing.back(), key, sizeof missing.back());
  }
  const Position cached = told.num_cached - told.num_cached % block_size();
  for (std::uint32_t known = 0; known < missing.size();) {
    const auto found = evicted_.find(missing.data() + known, static_cast<std::uint32_t>(missing.size()) - known);
    if (found.count == 0) return;
    if (known == 0) told.evicted_seconds_ago = now_ - first_time_ - found.value;
    known += found.count;
    told.reason = MissReason::kEvicted;
    told.num_evicted = cached + known * block_size() - told.num_cached;
  }
}

void PrefixCache::check_invariants() const {
  std::vector<std::uint8_t> owned(num_blocks(), 0);
  tree_.check(owned);
  auto own = [&](BlockId block, const char* what) {
    ensure(!owned[block], what);
    owned[block] = 1;
  };
  pool_.for_each_free([&](BlockId block) { own(block, "a free block is in use"); });
  for (const Sequence* sequence = running_; sequence != nullptr; sequence = sequence->next) {
    const Node& anchor = tree_.nodes()[sequence->anchor];
    const std::uint32_t in_tree = blocks_for(anchor.end);
    ensure(anchor.anchors > 0 && in_tree <= sequence->table.size(), "a running request has lost its anchor");
    std::vector<BlockId> path(in_tree);
    tree_.copy_path(sequence->anchor, 0, in_tree, path.data());
    ensure(std::equal(path.begin(), path.end(), sequence->table.begin()), "a block table is not its path");
    for (std::size_t i = in_tree; i < sequence->table.size(); ++i) own(sequence->table[i], "a private block is shared");
  }
  ensure(std::find(owned.begin(), owned.end(), 0) == owned.end(), "a block has leaked");
}

std::size_t PrefixCache::bytes() const {
  std::size_t names = spaces_.capacity() * sizeof(Space);
  for (const auto& [name, id] : space_ids_) names += 2 * name.capacity() + spaces_[id].name.capacity();
  for (const auto& [name, id] : tenants_) names += sizeof id + name.capacity();
  return tree_.bytes() + evicted_.bytes() + names +
         std::size_t{num_blocks() - pool_.num_free()} * pool_.bytes_per_block();
}

}  // namespace caudex
