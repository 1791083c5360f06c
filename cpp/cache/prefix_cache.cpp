#include "cache/prefix_cache.hpp"

#include <algorithm>
#include <unordered_set>

namespace caudex {
namespace {

void require_running(const Sequence& sequence) {
  if (!sequence.running) throw std::invalid_argument("this sequence has been released: begin() a new one");
}

}  // namespace

PrefixCache::PrefixCache(const CacheOptions& options)
    : options_(options),
      hasher_(options.hasher_factory ? options.hasher_factory() : make_hasher(options.hash, options.secret)),
      pool_(options.num_blocks, options.block_size, hasher_->key_bytes()),
      audiences_(options.sharing == Sharing::kAnonymous ? options.k : 0),
      tree_(options.grain, pool_, *hasher_, audiences_),
      evicted_(options.thrash_window) {
  const PolicyContext context{tree_.nodes(), pool_, now_, options.tokens_per_id};
  tree_.use_policy(options.policy_factory ? options.policy_factory(context) : make_policy(options.policy, context));
}

PrefixCache::~PrefixCache() {
  for (Sequence* sequence = running_; sequence != nullptr; sequence = sequence->next) sequence->running = false;
}

// ------------------------------------------------------------------------------------------- namespaces and tenants

std::string PrefixCache::tree_name(const Prompt& prompt) const {
  for (std::string_view name : {prompt.space, prompt.tenant}) {
    if (name.find('\0') != name.npos) throw std::invalid_argument("a namespace or tenant cannot contain a NUL");
  }
  std::string name(prompt.space);
  if (options_.sharing == Sharing::kIsolated && !prompt.tenant.empty()) name.append(1, '\0').append(prompt.tenant);
  return name;
}

const PrefixCache::Space* PrefixCache::find_space(const Prompt& prompt) const {
  if (prompt.space.empty() && prompt.tenant.empty()) {  // the usual case, without a string made and hashed
    return unnamed_space_ == kNoSpace ? nullptr : &spaces_[unnamed_space_];
  }
  auto found = space_ids_.find(tree_name(prompt));
  return found == space_ids_.end() ? nullptr : &spaces_[found->second];
}

SpaceId PrefixCache::open_space(const Prompt& prompt) {
  if (const Space* space = find_space(prompt)) return static_cast<SpaceId>(space - spaces_.data());
  if (space_ids_.size() >= space_limit_) forget_idle_spaces();
  std::string name = tree_name(prompt);
  return open_tree(std::string(prompt.space), std::move(name));
}

SpaceId PrefixCache::open_tree(std::string name, std::string tree_name) {
  auto found = space_ids_.find(tree_name);
  if (found != space_ids_.end()) return found->second;
  if (spare_spaces_.empty()) {
    spare_spaces_.push_back(static_cast<SpaceId>(spaces_.size()));
    spaces_.emplace_back();
  }
  const SpaceId id = spare_spaces_.back();
  spare_spaces_.pop_back();
  if (tree_name.empty()) unnamed_space_ = id;
  spaces_[id] = {std::move(name), tree_name, tree_.add_root(id, tree_name), {}, {}};
  space_ids_.emplace(std::move(tree_name), id);
  return id;
}

// Tenants are told apart only where prefixes are shared between some of them and not between others.
Tenant PrefixCache::find_tenant(std::string_view name) const {
  if (options_.sharing == Sharing::kIsolated || options_.sharing == Sharing::kShared) return 0;
  auto found = tenants_.find(std::string(name));
  return found == tenants_.end() ? kOperator - 1 : found->second;
}

Tenant PrefixCache::open_tenant(std::string_view name) {
  if (options_.sharing == Sharing::kIsolated || options_.sharing == Sharing::kShared) return 0;
  auto found = tenants_.find(std::string(name));
  if (found != tenants_.end()) return found->second;
  if (tenants_.size() >= tenant_limit_) forget_idle_tenants();
  return add_tenant(std::string(name));
}

Tenant PrefixCache::add_tenant(std::string name) {
  // Every id below the sum of both is either taken or spare.
  const Tenant id = spare_tenants_.empty() ? static_cast<Tenant>(tenants_.size()) : spare_tenants_.back();
  const auto [at, is_new] = tenants_.emplace(std::move(name), id);
  if (is_new && !spare_tenants_.empty()) spare_tenants_.pop_back();
  return at->second;
}

void PrefixCache::register_public(const Prompt& prompt) {
  if (options_.sharing != Sharing::kPublic) {
    throw std::invalid_argument("prefixes are registered in a cache with sharing='public'");
  }
  if (prompt.count == 0) throw std::invalid_argument("a registered prefix needs at least one token");
  require_valid(prompt.content, prompt.count);
  std::vector<Token> tokens(prompt.tokens, prompt.tokens + prompt.count);
  content_.write(prompt.content, tokens);
  Space& space = spaces_[open_space(prompt)];
  Position end = static_cast<Position>(tokens.size());
  if (options_.grain == Grain::kBlock) end -= end % block_size();
  const Walk walk = tree_.walk(space.root, tokens.data(), end, kOperator);
  if (walk.end > 0) tree_.publish(tree_.node_ending_at(walk.node, walk.end));
  space.registered.push_back(std::move(tokens));
}

Position PrefixCache::public_length(const Space& space, const Token* tokens, std::size_t count) const {
  std::size_t longest = 0;
  for (const std::vector<Token>& prefix : space.registered) {
    const std::size_t limit = std::min(prefix.size(), count);
    longest = std::max<std::size_t>(longest, std::mismatch(tokens, tokens + limit, prefix.begin()).first - tokens);
  }
  if (options_.grain == Grain::kBlock) longest -= longest % block_size();
  return static_cast<Position>(longest);
}

// ------------------------------------------------------------------------------------------------------- look-up

// The prompt's tokens as the tree knows them: content in place of placeholders. `copy` is where they lie if need be.
const Token* PrefixCache::readable_tokens(const Prompt& prompt, std::vector<Token>& copy) const {
  if (prompt.content.empty()) return prompt.tokens;
  require_valid(prompt.content, prompt.count);
  copy.assign(prompt.tokens, prompt.tokens + prompt.count);
  content_.read(prompt.content, copy);
  return copy.data();
}

Match PrefixCache::match(const Prompt& prompt) const {
  Match match;
  std::vector<Token> copy;
  const Token* tokens = readable_tokens(prompt, copy);
  const Space* space = find_space(prompt);
  if (space == nullptr || prompt.count == 0) return match;
  const Walk walk =
      tree_.walk(space->root, tokens, static_cast<Position>(prompt.count - 1), find_tenant(prompt.tenant));
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

Position PrefixCache::count_cached(const Prompt& prompt) const {
  std::vector<Token> copy;
  const Token* tokens = readable_tokens(prompt, copy);
  const Space* space = find_space(prompt);
  if (space == nullptr || prompt.count == 0) return 0;
  return tree_.walk(space->root, tokens, static_cast<Position>(prompt.count - 1), find_tenant(prompt.tenant)).end;
}

// ------------------------------------------------------------------------------------------- a request's way through

void PrefixCache::begin(Sequence& sequence, const Prompt& prompt) {
  start(sequence, prompt);
  Stats& stats = spaces_[sequence.space].stats;
  const Position whole = static_cast<Position>(sequence.table.size()) * block_size();
  ++stats.requests;
  stats.lookup_tokens += prompt.count;
  stats.hit_whole_tokens += whole;
  stats.hit_partial_tokens += sequence.num_cached - whole;
}

void PrefixCache::resume(Sequence& sequence, const Prompt& prompt) {
  start(sequence, prompt);
  Stats& stats = spaces_[sequence.space].stats;
  ++stats.resumed_requests;
  stats.resumed_tokens += prompt.count;
  stats.resumed_hit_tokens += sequence.num_cached;
}

void PrefixCache::start(Sequence& sequence, const Prompt& prompt) {
  if (prompt.count == 0) throw std::invalid_argument("a request needs at least one token, got none");
  if (prompt.count > kMaxTokens) {
    throw std::invalid_argument("a request of " + std::to_string(prompt.count) + " tokens is too long");
  }
  require_valid(prompt.content, prompt.count);
  sequence.space = open_space(prompt);
  sequence.tenant = open_tenant(prompt.tenant);
  sequence.tokens.assign(prompt.tokens, prompt.tokens + prompt.count);
  if (!prompt.content.empty()) {
    if (content_.size() > 2 * std::size_t{num_blocks()} + 1024) forget_unused_content();
    content_.write(prompt.content, sequence.tokens);
  }
  find_prefix(sequence, prompt.count - 1);
  sequence.num_prompt = static_cast<Position>(prompt.count);
  enlist(sequence);
}

// Pins the longest cached prefix of at most `limit` tokens.
void PrefixCache::find_prefix(Sequence& sequence, std::size_t limit) {
  const Space& space = spaces_[sequence.space];
  if (!space.registered.empty()) {
    sequence.num_public = public_length(space, sequence.tokens.data(), sequence.tokens.size());
  }
  const Walk walk = tree_.walk(space.root, sequence.tokens.data(), static_cast<Position>(limit), sequence.tenant);
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
  sequence.num_cached = sequence.num_committed = walk.end;
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
    pending_copies_.reserve(pending_copies_.size() + 1);
    sequence.table.resize(wanted);
    take_blocks(sequence.table.data() + held, sequence.table.data() + wanted);
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

// Fills the table's new places: with free blocks, then with evicted ones. The caller guarantees that there are enough.
void PrefixCache::take_blocks(BlockId* begin, BlockId* end) {
  while (begin != end && pool_.num_free() > 0) *begin++ = pool_.take();
  while (begin != end) begin += evict(static_cast<std::uint32_t>(end - begin), begin);
}

// Evicts at least one block and remembers what it was.
std::uint32_t PrefixCache::evict(std::uint32_t wanted, BlockId* blocks) {
  const Eviction eviction = tree_.evict(wanted, blocks);
  Stats& stats = spaces_[eviction.space].stats;
  stats.evicted_blocks += eviction.num_blocks;
  stats.evicted_tokens += eviction.num_tokens;
  const std::uint32_t first = eviction.num_tokens / block_size() < eviction.num_blocks;  // a partly filled one has no key
  fingerprints_.clear();
  for (std::uint32_t i = first; i < eviction.num_blocks; ++i) fingerprints_.push_back(pool_.fingerprint(blocks[i]));
  evicted_.add(fingerprints_.data(), static_cast<std::uint32_t>(fingerprints_.size()),
               static_cast<float>(now_ - first_time_), [](float, std::uint32_t) {});
  for (std::uint64_t fingerprint : fingerprints_) events_.removed(eviction.space, fingerprint);
  return eviction.num_blocks;
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
  child.tenant = parent.tenant;
  child.num_public = parent.num_public;
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
  child.table.resize(wanted);
  take_blocks(child.table.data() + shared, child.table.data() + wanted);
  for (std::uint32_t i = shared; i < wanted; ++i) {
    const std::uint32_t slots = std::min(block_size(), parent.num_committed - i * block_size());
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
  request.num_output_tokens =
      static_cast<Position>(sequence.tokens.size()) - sequence.num_prompt + sequence.num_unseen_output;
  request.hints = sequence.hints;
  if (sequence.is_pin) num_budgeted_ -= static_cast<std::uint32_t>(sequence.table.size());
  else tree_.policy().end_request(request);
  if (sequence.source != kNoNode) tree_.let_go(sequence.source);
  tree_.release(sequence.anchor);

  if (sequence.previous != nullptr) sequence.previous->next = sequence.next;
  else running_ = sequence.next;
  if (sequence.next != nullptr) sequence.next->previous = sequence.previous;
  sequence = Sequence{};
}

// ------------------------------------------------------------------------------------------------ pins, and the end

void PrefixCache::pin(Sequence& pin, const Prompt& prompt) {
  require_valid(prompt.content, prompt.count);
  if (prompt.count > kMaxTokens) throw std::invalid_argument("the prefix to pin is too long");
  pin.space = open_space(prompt);
  pin.tenant = open_tenant(prompt.tenant);
  pin.tokens.assign(prompt.tokens, prompt.tokens + prompt.count);
  content_.read(prompt.content, pin.tokens);
  const Walk walk = tree_.walk(spaces_[pin.space].root, pin.tokens.data(), static_cast<Position>(prompt.count),
                               pin.tenant);
  const std::uint32_t whole_blocks = walk.end / block_size();
  if (whole_blocks > options_.pin_budget - num_budgeted_) {
    throw OutOfBlocks("cannot pin " + std::to_string(whole_blocks) + " blocks: " + std::to_string(num_budgeted_) +
                      " of the budget of " + std::to_string(options_.pin_budget) + " are taken");
  }
  pin.tokens.resize(whole_blocks * block_size());
  pin.table.resize(whole_blocks);
  pin.anchor = tree_.node_ending_at(walk.node, whole_blocks * block_size());
  tree_.copy_path(pin.anchor, 0, whole_blocks, pin.table.data());
  tree_.anchor(pin.anchor);
  pin.num_prompt = pin.num_cached = pin.num_committed = whole_blocks * block_size();
  pin.is_pin = true;
  num_budgeted_ += whole_blocks;
  enlist(pin);
}

// Bounds the book of contents by the pool: what no block and no request refers to any more is dropped.
void PrefixCache::forget_unused_content() {
  std::unordered_set<std::uint32_t> live;
  auto note = [&](Token token) {
    if (token < 0) live.insert(ContentBook::code_of(token));
  };
  tree_.for_each_token(note);
  for (const Sequence* sequence = running_; sequence != nullptr; sequence = sequence->next) {
    std::for_each(sequence->tokens.begin(), sequence->tokens.end(), note);
  }
  for (const Space& space : spaces_) {
    for (const std::vector<Token>& prefix : space.registered) std::for_each(prefix.begin(), prefix.end(), note);
  }
  content_.keep_only(live);
}

void PrefixCache::clear() {
  const bool everything = num_pinned() == 0;
  std::vector<BlockId> blocks(tree_.num_cached());
  while (tree_.num_cached() > 0) {
    const Eviction eviction = tree_.evict(tree_.num_cached(), blocks.data());
    for (std::uint32_t i = 0; i < eviction.num_blocks; ++i) {
      const bool is_full = i > 0 || eviction.num_tokens == eviction.num_blocks * block_size();
      if (!everything && is_full) events_.removed(eviction.space, pool_.fingerprint(blocks[i]));
      pool_.give(blocks[i]);
    }
  }
  if (everything) events_.cleared();
  evicted_.clear();
}

}  // namespace caudex
