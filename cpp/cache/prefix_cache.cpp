#include "cache/prefix_cache.hpp"

#include <algorithm>
#include <limits>

namespace caudex {
namespace {

constexpr std::size_t kMaxTokens = std::numeric_limits<std::int32_t>::max();

void require_running(const Sequence& sequence) {
  if (!sequence.running) throw std::invalid_argument("this sequence has been released: begin() a new one");
}

}  // namespace

PrefixCache::PrefixCache(const CacheOptions& options)
    : hasher_(make_hasher(options.hash, options.secret)),
      pool_(options.num_blocks, options.block_size, hasher_->key_bytes()),
      tree_(options.grain, pool_, *hasher_),
      evicted_(options.thrash_window) {
  tree_.use_policy(make_policy(options.policy, {tree_.nodes(), pool_}));
}

PrefixCache::~PrefixCache() {
  for (Sequence* sequence = running_; sequence != nullptr; sequence = sequence->next) sequence->running = false;
}

// ------------------------------------------------------------------------------------------------------- look-up

const PrefixCache::Space* PrefixCache::find_space(const std::string& name) const {
  auto found = space_ids_.find(name);
  return found == space_ids_.end() ? nullptr : &spaces_[found->second];
}

SpaceId PrefixCache::open_space(const std::string& name) {
  auto found = space_ids_.find(name);
  if (found != space_ids_.end()) return found->second;
  const auto id = static_cast<SpaceId>(spaces_.size());
  spaces_.push_back({name, tree_.add_root(id, name), {}});
  space_ids_.emplace(name, id);
  return id;
}

Walk PrefixCache::look_up(NodeId root, const Token* tokens, std::size_t count) const {
  return tree_.walk(root, tokens, static_cast<Position>(count - 1));
}

Match PrefixCache::match(const Token* tokens, std::size_t count, const std::string& name) const {
  Match match;
  const Space* space = find_space(name);
  if (space == nullptr || count == 0) return match;
  const Walk walk = look_up(space->root, tokens, count);
  const std::uint32_t whole_blocks = walk.end / block_size();
  match.num_tokens = walk.end;
  match.num_whole = whole_blocks * block_size();
  match.blocks.resize(whole_blocks);
  tree_.copy_path(walk.node, 0, whole_blocks, match.blocks.data());
  if (match.num_tokens > match.num_whole) {
    match.partial_block = tree_.block_at(tree_.holder_of(walk.node, whole_blocks), whole_blocks);
  }
  return match;
}

// ------------------------------------------------------------------------------------------- a request's way through

void PrefixCache::begin(Sequence& sequence, const Token* tokens, std::size_t count, const std::string& space) {
  start(sequence, tokens, count, space);
  Stats& stats = spaces_[sequence.space].stats;
  const Position whole = static_cast<Position>(sequence.table.size()) * block_size();
  ++stats.requests;
  stats.lookup_tokens += count;
  stats.hit_whole_tokens += whole;
  stats.hit_partial_tokens += sequence.num_cached - whole;
}

void PrefixCache::resume(Sequence& sequence, const Token* tokens, std::size_t count, const std::string& space) {
  start(sequence, tokens, count, space);
  Stats& stats = spaces_[sequence.space].stats;
  ++stats.resumed_requests;
  stats.resumed_tokens += count;
  stats.resumed_hit_tokens += sequence.num_cached;
}

void PrefixCache::start(Sequence& sequence, const Token* tokens, std::size_t count, const std::string& space) {
  if (count == 0) throw std::invalid_argument("a request needs at least one token, got none");
  if (count > kMaxTokens) throw std::invalid_argument("a request of " + std::to_string(count) + " tokens is too long");
  sequence.tokens.assign(tokens, tokens + count);
  sequence.space = open_space(space);
  const NodeId root = spaces_[sequence.space].root;
  const Walk walk = look_up(root, sequence.tokens.data(), count);
  const std::uint32_t whole_blocks = walk.end / block_size();
  const Position whole = whole_blocks * block_size();

  sequence.table.resize(whole_blocks);
  sequence.anchor = tree_.node_ending_at(walk.node, whole);
  tree_.copy_path(sequence.anchor, 0, whole_blocks, sequence.table.data());
  tree_.anchor(sequence.anchor);
  if (walk.end > whole) {
    // Only the block to copy is held, so the node is cut behind it.
    NodeId source = tree_.holder_of(walk.node, whole_blocks);
    const Position border = whole + block_size();
    if (tree_.nodes()[source].end > border) source = tree_.node_ending_at(source, border);
    tree_.hold(source);
    sequence.source = source;
    sequence.source_block = tree_.block_at(source, whole_blocks);
  }
  sequence.num_prompt = static_cast<Position>(count);
  sequence.num_cached = sequence.num_committed = walk.end;
  enlist(sequence);
}

void PrefixCache::enlist(Sequence& sequence) {
  sequence.serial = ++num_begun_;
  sequence.begin_time = now_;
  sequence.running = true;
  sequence.previous = nullptr;
  sequence.next = running_;
  if (running_ != nullptr) running_->previous = &sequence;
  running_ = &sequence;
}

std::vector<BlockCopy> PrefixCache::allocate(Sequence& sequence, std::size_t num_tokens) {
  require_running(sequence);
  if (num_tokens > kMaxTokens) {
    throw std::invalid_argument("cannot allocate slots for " + std::to_string(num_tokens) + " tokens: too many");
  }
  const std::size_t wanted = blocks_for(num_tokens);
  const std::size_t held = sequence.table.size();
  if (wanted > held) {
    require_blocks(wanted - held);
    sequence.table.reserve(wanted);
    pending_copies_.reserve(pending_copies_.size() + 1);
    while (sequence.table.size() < wanted) sequence.table.push_back(take_block());
    if (sequence.source != kNoNode) {
      const std::uint32_t slots = sequence.num_cached % block_size();
      pending_copies_.push_back({sequence.source_block, sequence.table[held], slots});
      tree_.let_go(sequence.source);
      sequence.source = kNoNode;
    }
  }
  return std::exchange(pending_copies_, {});
}

void PrefixCache::require_blocks(std::uint64_t count) const {
  if (count <= num_available()) return;
  throw OutOfBlocks("need " + std::to_string(count) + " more blocks, but of " + std::to_string(num_blocks()) + " only " +
                    std::to_string(num_free()) + " are free and " + std::to_string(num_cached()) +
                    " evictable: release a request, or make the pool larger");
}

BlockId PrefixCache::take_block() {
  if (pool_.num_free() > 0) return pool_.take();
  const Eviction eviction = tree_.evict();
  Stats& stats = spaces_[eviction.space].stats;
  ++stats.evicted_blocks;
  stats.evicted_tokens += eviction.num_slots;
  if (eviction.num_slots == block_size()) evicted_.add(pool_.fingerprint(eviction.block), now_);
  return eviction.block;
}

void PrefixCache::append(Sequence& sequence, const Token* tokens, std::size_t count) {
  require_running(sequence);
  if (count > kMaxTokens - sequence.tokens.size()) throw std::invalid_argument("the sequence would grow too long");
  sequence.tokens.insert(sequence.tokens.end(), tokens, tokens + count);
}

std::vector<BlockCopy> PrefixCache::append_and_allocate(const std::vector<Sequence*>& sequences, const Token* tokens) {
  std::uint64_t wanted = 0;
  ++num_batches_;
  for (Sequence* sequence : sequences) {
    require_running(*sequence);
    if (std::exchange(sequence->batch, num_batches_) == num_batches_) {
      throw std::invalid_argument("a sequence takes part twice in one batch");
    }
    const std::size_t blocks = blocks_for(sequence->tokens.size() + 1);
    if (blocks > sequence->table.size()) wanted += blocks - sequence->table.size();
  }
  require_blocks(wanted);
  std::vector<BlockCopy> copies;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    Sequence& sequence = *sequences[i];
    sequence.tokens.push_back(tokens[i]);
    if (sequence.table.size() * block_size() >= sequence.tokens.size()) continue;
    const std::vector<BlockCopy> more = allocate(sequence, sequence.tokens.size());
    copies.insert(copies.end(), more.begin(), more.end());
  }
  copies.insert(copies.end(), pending_copies_.begin(), pending_copies_.end());
  pending_copies_.clear();
  return copies;
}

void PrefixCache::require_committable(const Sequence& sequence, std::size_t num_tokens) const {
  require_running(sequence);
  const std::size_t slots = sequence.table.size() * block_size();
  if (num_tokens <= sequence.num_committed) return;
  if (num_tokens <= sequence.tokens.size() && num_tokens <= slots) return;
  throw std::invalid_argument("cannot commit " + std::to_string(num_tokens) + " tokens: the sequence has " +
                              std::to_string(sequence.tokens.size()) + " and slots for " + std::to_string(slots));
}

void PrefixCache::commit(Sequence& sequence, std::size_t num_tokens) {
  require_committable(sequence, num_tokens);
  if (num_tokens <= sequence.num_committed) return;
  spaces_[sequence.space].stats.committed_tokens += num_tokens - sequence.num_committed;
  sequence.num_committed = static_cast<Position>(num_tokens);
  store(sequence);
}

void PrefixCache::commit_all(const std::vector<Sequence*>& sequences) {
  for (const Sequence* sequence : sequences) require_committable(*sequence, sequence->tokens.size());
  for (Sequence* sequence : sequences) commit(*sequence, sequence->tokens.size());
}

void PrefixCache::fork(const Sequence& parent, Sequence& child) {
  require_running(parent);
  const Position in_tree = tree_.nodes()[parent.anchor].end;
  const std::uint32_t shared = in_tree / block_size();
  const std::uint32_t wanted = parent.source != kNoNode ? shared : blocks_for(parent.num_committed);
  require_blocks(wanted - shared);

  child.space = parent.space;
  child.tokens = parent.tokens;
  child.hints = parent.hints;
  child.table.reserve(wanted);
  child.table.assign(parent.table.begin(), parent.table.begin() + shared);
  child.num_prompt = parent.num_prompt;
  child.num_cached = child.num_committed = parent.num_committed;
  pending_copies_.reserve(pending_copies_.size() + wanted - shared);
  child.anchor = tree_.node_ending_at(parent.anchor, shared * block_size());
  tree_.anchor(child.anchor);
  child.source = parent.source;
  child.source_block = parent.source_block;
  if (child.source != kNoNode) tree_.hold(child.source);
  for (std::uint32_t i = shared; i < wanted; ++i) {
    const std::uint32_t slots = std::min(block_size(), parent.num_committed - i * block_size());
    child.table.push_back(take_block());
    pending_copies_.push_back({parent.table[i], child.table[i], slots});
  }
  enlist(child);
}

void PrefixCache::release(Sequence& sequence) {
  require_running(sequence);
  store(sequence);
  const std::size_t in_tree = blocks_for(tree_.nodes()[sequence.anchor].end);
  for (std::size_t i = sequence.table.size(); i > in_tree; --i) pool_.give(sequence.table[i - 1]);

  Request request;
  request.serial = sequence.serial;
  request.begin_time = sequence.begin_time;
  request.end_time = now_;
  request.space = sequence.space;
  request.leaf = sequence.anchor;
  request.num_prompt_tokens = sequence.num_prompt;
  request.num_cached_tokens = sequence.num_cached;
  request.num_tokens = sequence.num_committed;
  request.hints = sequence.hints;
  tree_.policy().end_request(request);
  if (sequence.source != kNoNode) tree_.let_go(sequence.source);
  tree_.release(sequence.anchor);

  if (sequence.previous != nullptr) sequence.previous->next = sequence.next;
  else running_ = sequence.next;
  if (sequence.next != nullptr) sequence.next->previous = sequence.previous;
  sequence = Sequence{};
}

// --------------------------------------------------------------------------------------------------- into the tree

// Enters what is written but not yet in the tree.
void PrefixCache::store(Sequence& sequence) {
  Position end = sequence.num_committed;
  if (tree_.grain() == Grain::kBlock) end -= end % block_size();
  if (sequence.source != kNoNode || end <= tree_.nodes()[sequence.anchor].end) return;
  const Walk walk = tree_.walk(sequence.anchor, sequence.tokens.data(), end);
  adopt(sequence, walk);
  if (walk.end < end) keep(sequence, walk, end);
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
void PrefixCache::keep(Sequence& sequence, const Walk& walk, Position end) {
  const NodeId parent = tree_.node_ending_at(walk.node, walk.end);
  const Node& node = tree_.nodes()[parent];
  const BlockId* table = sequence.table.data();
  const Position size = block_size();
  Position from = walk.end;
  const bool ours = parent == sequence.anchor;
  // Our anchor may end inside the block that the new leaf begins with, and hold it as its tail: `parent` is the anchor,
  // or another request's tokens go on a little further inside that block.
  const Node& anchor = tree_.nodes()[sequence.anchor];
  const bool moves_tail = tree_.ends_inside_block(anchor) && anchor.end / size == from / size && tree_.has_tail(anchor);
  const bool being_copied = anchor.anchors > 1;
  if (moves_tail && being_copied && !(ours && node.is_leaf())) return;  // later: our last block is still needed there

  write_tokens(sequence, from, end);
  if (ours && node.growing && node.is_leaf()) {
    // A leaf whose last block is about to be copied keeps it in last place, so that nothing else is pinned with it.
    const Position border = blocks_for(from) * size;
    const Position reach = being_copied ? std::min(end, border) : end;
    if (reach > from) tree_.extend_leaf(parent, reach, table + blocks_for(from), blocks_for(reach) - blocks_for(from));
    if (reach == end) return;
    from = reach;
  } else if (moves_tail) {
    tree_.take_tail(sequence.anchor);  // it becomes the first block of the new leaf
  }
  const std::uint32_t first = from / size;
  const NodeId leaf = tree_.add_leaf(parent, end, table + first, blocks_for(end) - first);
  tree_.descend(sequence.anchor, leaf);
  tree_.start_growing(leaf);
  sequence.anchor = leaf;
}

void PrefixCache::write_tokens(const Sequence& sequence, Position from, Position end) {
  const Position size = block_size();
  Stats& stats = spaces_[sequence.space].stats;
  for (std::uint32_t i = from / size; i * size < end; ++i) {
    const BlockId block = sequence.table[i];
    const Token* tokens = sequence.tokens.data() + i * size;
    const Position count = std::min(size, end - i * size);
    std::copy(tokens, tokens + count, pool_.tokens(block));
    if (count < size) continue;
    hasher_->chain(i == 0 ? tree_.root_key(sequence.space) : pool_.key(sequence.table[i - 1]), tokens, size,
                   pool_.key(block));
    if (evicted_.take(pool_.fingerprint(block))) stats.thrashed_tokens += size;
  }
}

void PrefixCache::clear() {
  while (tree_.num_cached() > 0) pool_.give(tree_.evict().block);
  evicted_.clear();
}

// -------------------------------------------------------------------------------------------------- looking inside

Stats PrefixCache::stats(const std::string& name) const {
  const Space* space = find_space(name);
  return space == nullptr ? Stats{} : space->stats;
}

Stats PrefixCache::stats() const {
  Stats sum;
  for (const Space& space : spaces_) sum += space.stats;
  return sum;
}

std::vector<std::string> PrefixCache::spaces() const {
  std::vector<std::string> names;
  for (const Space& space : spaces_) names.push_back(space.name);
  return names;
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
  return tree_.bytes() + std::size_t{num_blocks() - pool_.num_free()} * pool_.bytes_per_block();
}

}  // namespace caudex
