// How what a request has written becomes matchable: the part of PrefixCache that enters blocks into the tree.
#include <algorithm>

#include "cache/prefix_cache.hpp"

namespace caudex {

// Enters what is written but not yet in the tree.
void PrefixCache::store(Sequence& sequence) {
  if (sequence.source != kNoNode) return;  // nothing has been written yet
  Position end = sequence.num_committed;
  if (tree_.grain() == Grain::kBlock) end -= end % block_size();
  if (sequence.num_public > 0) store_until(sequence, std::min(end, sequence.num_public), true);
  store_until(sequence, end, false);
}

void PrefixCache::store_until(Sequence& sequence, Position end, bool is_public) {
  const NodeId anchor = sequence.anchor;
  if (end <= tree_.nodes()[anchor].end) return;
  Walk walk = tree_.walk(anchor, sequence.tokens.data(), end, kOperator);
  const bool told_apart = options_.sharing == Sharing::kPublic || options_.sharing == Sharing::kAnonymous;
  if (told_apart && walk.node != anchor) {
    walk.node = tree_.node_ending_at(walk.node, walk.end);
    if (is_public) tree_.publish(walk.node);
    else tree_.credit(anchor, walk.node, sequence.tenant);
  }
  adopt(sequence, walk);
  if (walk.end < end) keep(sequence, walk, end, is_public);
}

// Whole blocks that somebody else has put there take the place of ours.
void PrefixCache::adopt(Sequence& sequence, const Walk& walk) {
  const Position from = tree_.nodes()[sequence.anchor].end;
  const Position whole = walk.end - walk.end % block_size();
  if (whole <= from) return;
  const NodeId to = tree_.node_ending_at(walk.node, whole);
  // A partly filled last block in the tree goes with the anchor, see BlockTree::descend.
  const std::uint32_t first = from / block_size();
  const std::uint32_t last = whole / block_size();
  for (std::uint32_t i = blocks_for(from); i < last; ++i) pool_.give(sequence.table[i]);
  tree_.copy_path(to, first, last, sequence.table.data() + first);
  tree_.descend(sequence.anchor, to);
  sequence.anchor = to;
  spaces_[sequence.space].stats.adopted_blocks += last - first;
}

// Our own blocks become matchable, from where the tree's knowledge ends.
void PrefixCache::keep(Sequence& sequence, const Walk& walk, Position end, bool is_public) {
  const NodeId parent = tree_.node_ending_at(walk.node, walk.end);
  const Node& anchor = tree_.nodes()[sequence.anchor];
  const BlockId* table = sequence.table.data();
  const Position size = block_size();
  Position from = walk.end;
  const bool being_copied = anchor.anchors > 1;
  const bool told_apart = options_.sharing == Sharing::kPublic || options_.sharing == Sharing::kAnonymous;
  const AudienceId audience = told_apart && !is_public ? audiences_.only(sequence.tenant) : kEveryone;
  const bool grows =
      parent == sequence.anchor && anchor.growing && anchor.is_leaf() && anchor.audience == audience;
  // Is our last, partly filled block in the tree already, where others have gone on from its middle?
  const bool moves_tail = !grows && anchor.end % size != 0 && from / size == anchor.end / size;
  if (moves_tail && being_copied) return audiences_.drop(audience);  // later: it is still needed where it is

  write_tokens(sequence, from, end);
  if (grows) {
    // A leaf whose last block is about to be copied keeps it in last place, so that nothing else is pinned with it.
    const Position border = blocks_for(from) * size;
    const Position reach = being_copied ? std::min(end, border) : end;
    if (reach > from) tree_.extend_leaf(parent, reach, table + blocks_for(from), blocks_for(reach) - blocks_for(from));
    if (reach == end) return audiences_.drop(audience);
    from = reach;
  }
  if (moves_tail) tree_.take_tail(sequence.anchor);  // it becomes the first block of the new leaf
  const std::uint32_t first = from / size;
  const NodeId leaf = tree_.add_leaf(parent, end, table + first, blocks_for(end) - first, audience);
  tree_.descend(sequence.anchor, leaf);
  tree_.start_growing(leaf);
  sequence.anchor = leaf;
}

void PrefixCache::write_tokens(const Sequence& sequence, Position from, Position end) {
  const Position size = block_size();
  for (std::uint32_t i = from / size; i * size < end; ++i) {
    const BlockId block = sequence.table[i];
    const Token* tokens = sequence.tokens.data() + i * size;
    const Position count = std::min(size, end - i * size);
    std::copy(tokens, tokens + count, pool_.tokens(block));
    if (count < size) continue;
    const std::uint8_t* parent = i == 0 ? tree_.root_key(sequence.space) : pool_.key(sequence.table[i - 1]);
    hasher_->chain(parent, tokens, size, pool_.key(block));
  }
  note_stored(sequence, from / size, end / size);
}

// Blocks with these indices are full and matchable from now on.
void PrefixCache::note_stored(const Sequence& sequence, std::uint32_t first, std::uint32_t last) {
  fingerprints_.clear();
  for (std::uint32_t i = first; i < last; ++i) fingerprints_.push_back(pool_.fingerprint(sequence.table[i]));
  for (std::uint32_t i = first; i < last;) {
    const std::uint32_t found = evicted_.take(fingerprints_.data() + (i - first), last - i).count;
    spaces_[sequence.space].stats.thrashed_tokens += std::uint64_t{found} * block_size();
    i += std::max(found, 1u);
  }
  if (!events_.is_enabled()) return;
  for (std::uint32_t i = first; i < last; ++i) {
    const std::uint64_t parent = i > 0 ? pool_.fingerprint(sequence.table[i - 1]) : 0;
    events_.stored(sequence.space, i > 0, parent, fingerprints_[i - first], pool_.tokens(sequence.table[i]),
                   block_size());
  }
}

}  // namespace caudex
