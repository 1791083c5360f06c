// The prefix cache: requests, their blocks, and what is kept of them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cache/block_pool.hpp"
#include "cache/block_tree.hpp"
#include "cache/content.hpp"
#include "cache/event_log.hpp"
#include "cache/explanation.hpp"
#include "cache/ghost_runs.hpp"
#include "cache/hashing.hpp"
#include "cache/sequence.hpp"
#include "cache/sharing.hpp"
#include "cache/stats.hpp"

namespace caudex {

inline constexpr std::size_t kMaxTokens = INT32_MAX;  // of one request
inline constexpr std::size_t kFewNames = 256;  // so many namespaces, and tenants, are not worth forgetting any

struct CacheOptions {
  std::uint32_t num_blocks = 0;
  std::uint32_t block_size = 16;
  Grain grain = Grain::kToken;
  std::string policy = "lru";
  std::function<std::unique_ptr<Policy>(PolicyContext)> policy_factory;  // instead, if there is one
  std::string hash = "fold64";
  std::uint64_t secret = 0;
  std::function<std::unique_ptr<BlockHasher>()> hasher_factory;  // instead, if there is one
  std::uint32_t thrash_window = 0;  // evicted blocks that are remembered
  Sharing sharing = Sharing::kIsolated;
  std::uint32_t k = 0;           // for Sharing::kAnonymous
  std::uint32_t pin_budget = 0;  // blocks that pin() may hold altogether
  double tokens_per_id = 1.0;    // what a token id stands for: more than one in a replay of block ids
};

// What a request asks for.
struct Prompt {
  const Token* tokens = nullptr;
  std::size_t count = 0;
  std::string_view space;  // model, LoRA, salt: never shared across
  std::string_view tenant;  // shared across as the cache's Sharing says
  std::vector<ContentRange> content;
};

// What a look-up finds. Nothing is pinned or touched by it.
struct Match {
  Position num_tokens = 0;  // at most one less than asked: the last token's logits are always needed
  Position num_whole = 0;   // of them, in whole blocks
  std::vector<BlockId> blocks;
  BlockId partial_block = kNoBlock;  // holds the rest, num_tokens - num_whole, in its first slots
};

// Not thread-safe: the caller holds one lock around every call, as the Python face does.
//
// Each call either does all it says or throws and changes nothing. Every block of the pool is exactly one of
//   free, cached (in the tree, evictable), pinned (in the tree under a running request, or private to one).
class PrefixCache {
 public:
  explicit PrefixCache(const CacheOptions& options);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  Match match(const Prompt& prompt) const;
  // Only how many tokens would be found: for ordering a queue.
  Position count_cached(const Prompt& prompt) const;
  // Why the match did not go further.
  Explanation explain(const Prompt& prompt) const;

  // Looks up the longest cached prefix and pins it. The caller keeps `sequence` where it is until release().
  void begin(Sequence& sequence, const Prompt& prompt);
  // The same for a request that goes on after a preemption; its look-up is counted apart.
  void resume(Sequence& sequence, const Prompt& prompt);

  // Slots for the first `num_tokens` tokens. Evicts as needed; throws OutOfBlocks if that cannot be enough.
  std::vector<BlockCopy> allocate(Sequence& sequence, std::size_t num_tokens);
  void append(Sequence& sequence, const Token* tokens, std::size_t count);
  // One decoded token and its slot for each of these requests: all or none.
  std::vector<BlockCopy> append_and_allocate(const std::vector<Sequence*>& sequences, const Token* tokens);
  // The KV of the first `num_tokens` tokens has been written: it can be matched from now on.
  void commit(Sequence& sequence, std::size_t num_tokens);
  void commit_all(const std::vector<Sequence*>& sequences);
  // `child` begins as a copy of what `parent` has committed. Takes one block if that ends inside a block.
  void fork(const Sequence& parent, Sequence& child);
  // Unpins. What is committed stays cached, the rest of the blocks is free.
  void release(Sequence& sequence);

  // Keeps what is cached of this prompt, in whole blocks, until release(). Throws OutOfBlocks beyond the pin budget.
  void pin(Sequence& pin, const Prompt& prompt);
  std::uint32_t num_budgeted() const { return num_budgeted_; }
  // Everyone in the namespace may share these tokens. For Sharing::kPublic.
  void register_public(const Prompt& prompt);

  // Evicts all that is not pinned.
  void clear();

  // Makes the pool larger or smaller while in use, evicting if it must; throws OutOfBlocks if too much is pinned.
  // Returns the copies to execute before any later KV write; when shrinking, before the KV tensors are cut.
  std::vector<BlockCopy> resize(std::uint32_t num_blocks);
  // Moves blocks down so that all free ones lie at the end. Returns the copies to execute, likewise.
  std::vector<BlockCopy> compact();

  // The index as bytes; and the same index again, in an empty cache of the same shape and at least that many blocks.
  // load() throws std::invalid_argument for what is truncated, damaged, foreign or of another shape, and changes nothing.
  std::string save() const;
  void load(std::string_view file);

  // From now on, changes are collected for take_events(), up to that many blocks between two calls.
  void enable_events(std::size_t max_blocks) { events_.enable(max_blocks); }
  std::vector<CacheEvent> take_events() { return events_.take(); }
  // The namespace of an event as it was asked for, until that event has been taken and another call made.
  std::string space_name(SpaceId space) const { return space < spaces_.size() ? spaces_[space].name : std::string(); }

  std::uint32_t num_blocks() const { return pool_.num_blocks(); }
  std::uint32_t block_size() const { return pool_.block_size(); }
  std::uint32_t num_free() const { return pool_.num_free(); }
  std::uint32_t num_cached() const { return tree_.num_cached(); }
  std::uint32_t num_pinned() const { return num_blocks() - num_free() - num_cached(); }
  std::uint32_t num_available() const { return num_free() + num_cached(); }
  std::uint32_t num_nodes() const { return tree_.nodes().count(); }

  // Sums over everything since the start; or over a namespace, all tenants included, since it was last forgotten: that
  // may happen when it has no block, no request, no pin and no registered prefix, and more than kFewNames are known.
  Stats stats() const;
  Stats stats(std::string_view space) const;
  Occupancy occupancy() const;
  Occupancy occupancy(std::string_view space) const;
  // Those known: all that are in use, and of the idle ones the latest.
  std::vector<std::string> spaces() const;

  // Seconds on the clock that policies see. The caller sets it: wall time when serving, the trace's in a replay.
  void set_time(double seconds) {
    if (first_time_ < 0.0) first_time_ = seconds;
    now_ = seconds;
  }

  void check_invariants() const;
  std::string dump() const { return tree_.dump(); }
  std::size_t bytes() const;

 private:
  struct Space {
    std::string name;  // as asked for
    std::string tree_name;
    NodeId root = kNoNode;
    Stats stats;
    std::vector<std::vector<Token>> registered;

    bool is_open() const { return root != kNoNode; }  // otherwise its id is spare
  };

  struct Saved;
  struct SavedNode;
  struct SavedSpace;
  template <typename Id>
  using Places = std::unordered_map<Id, std::uint64_t>;  // of namespaces or tenants in a file
  template <typename Out>
  void save_nodes(Out& out, const Places<SpaceId>& spaces, const Places<Tenant>& tenants) const;
  Saved parse(std::string_view payload) const;
  void require_consistent(const Saved& saved) const;
  void adopt_saved(const Saved& saved);
  void adopt_node(const Saved& saved, const SavedNode& node, SpaceId space, const std::vector<Tenant>& tenants);

  SpaceId open_tree(std::string name, std::string tree_name);
  std::string tree_name(const Prompt& prompt) const;
  const Space* find_space(const Prompt& prompt) const;
  SpaceId open_space(const Prompt& prompt);
  Tenant find_tenant(std::string_view name) const;
  Tenant open_tenant(std::string_view name);
  Tenant add_tenant(std::string name);
  bool is_idle(const Space& space) const;
  void forget_idle_spaces();
  void forget_space(SpaceId id);
  void forget_idle_tenants();
  const Token* readable_tokens(const Prompt& prompt, std::vector<Token>& copy) const;
  void forget_unused_content();

  void start(Sequence& sequence, const Prompt& prompt);
  void find_prefix(Sequence& sequence, std::size_t limit);
  void enlist(Sequence& sequence);
  void require_committable(const Sequence& sequence, std::size_t num_tokens) const;

  void store(Sequence& sequence);
  void store_until(Sequence& sequence, Position end, bool is_public);
  void adopt(Sequence& sequence, const Walk& walk);
  void keep(Sequence& sequence, const Walk& walk, Position end, bool is_public);
  void write_tokens(const Sequence& sequence, Position from, Position end);
  void note_stored(const Sequence& sequence, std::uint32_t first, std::uint32_t last);
  Position public_length(const Space& space, const Token* tokens, std::size_t count) const;

  Occupancy private_blocks(const Sequence& sequence) const;

  void explain_divergence(Explanation& told, const Prompt& prompt, const Token* tokens) const;
  void explain_other_spaces(Explanation& told, const Prompt& prompt, const Token* tokens) const;
  void explain_eviction(Explanation& told, const Prompt& prompt, const Token* tokens) const;

  std::vector<BlockCopy> move_down(std::uint32_t num_blocks, std::uint32_t limit);
  std::uint32_t evict(std::uint32_t wanted, BlockId* blocks);
  void take_blocks(BlockId* begin, BlockId* end);
  void require_blocks(std::uint64_t count) const;
  std::uint32_t blocks_for(std::size_t num_tokens) const {
    return static_cast<std::uint32_t>((num_tokens + block_size() - 1) / block_size());
  }

  CacheOptions options_;
  std::unique_ptr<BlockHasher> hasher_;
  BlockPool pool_;
  Audiences audiences_;
  BlockTree tree_;
  ContentBook content_;
  std::vector<Space> spaces_;
  std::vector<SpaceId> spare_spaces_;
  std::unordered_map<std::string, SpaceId> space_ids_;
  std::size_t space_limit_ = kFewNames;  // with so many, idle ones are looked for
  Stats forgotten_;  // of namespaces that have been forgotten
  SpaceId unnamed_space_ = kNoSpace;
  std::unordered_map<std::string, Tenant> tenants_;
  std::vector<Tenant> spare_tenants_;
  std::size_t tenant_limit_ = kFewNames;
  GhostRuns<float> evicted_;  // when, in seconds since the cache was made
  std::vector<std::uint64_t> fingerprints_;  // of the blocks that are being evicted or stored
  EventLog events_;
  std::vector<BlockCopy> pending_copies_;  // from fork(), handed out by the next allocation of any request
  Sequence* running_ = nullptr;
  std::uint64_t num_begun_ = 0;
  std::uint64_t num_batches_ = 0;
  std::uint32_t num_budgeted_ = 0;
  double now_ = 0.0;
  double first_time_ = -1.0;
};

}  // namespace caudex
