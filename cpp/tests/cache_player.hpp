// Plays a stream of bytes as calls on a cache, with a KV buffer that shows at once when a block is not what it should be.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cache/prefix_cache.hpp"
#include "check.hpp"

namespace caudex::test {

// Bytes from a fuzzer or from a random generator; zeros when they have run out.
class Choices {
 public:
  Choices(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  bool is_done() const { return at_ >= size_; }
  std::uint32_t below(std::uint32_t limit) {
    const std::uint32_t low = is_done() ? 0 : data_[at_++];
    const std::uint32_t high = limit > 256 && !is_done() ? data_[at_++] : 0;
    return (low | high << 8) % limit;
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
};

class CachePlayer {
 public:
  explicit CachePlayer(Choices& choices)
      : choices_(choices), options_(choose_options(choices)), cache_(options_), hears_all_(choices.below(2) == 0) {
    if (hears_all_) cache_.enable_events(std::size_t{1} << 30);
    fit_kv();
  }

  ~CachePlayer() {
    for (auto& request : running_) cache_.release(*request->sequence);
    for (auto& pin : pins_) cache_.release(*pin);
    cache_.check_invariants();
    CHECK(cache_.num_pinned() == 0);
  }

  std::string save() const { return cache_.save(); }

  // Loads a file into a new cache of the same options, which refuses it and stays empty, or goes on to work.
  void restart_from(const std::string& file, Choices& choices) const {
    PrefixCache loaded(options_);
    try {
      loaded.load(file);
    } catch (const std::invalid_argument&) {
      CHECK(loaded.num_free() == loaded.num_blocks());
    }
    loaded.check_invariants();
    const std::vector<Token> tokens(1 + choices.below(30), static_cast<Token>(choices.below(3)));
    Prompt prompt;
    prompt.tokens = tokens.data();
    prompt.count = tokens.size();
    Sequence sequence;
    loaded.begin(sequence, prompt);
    try {
      loaded.allocate(sequence, prompt.count);
      loaded.commit(sequence, prompt.count);
    } catch (const OutOfBlocks&) {
    }
    loaded.release(sequence);
    loaded.check_invariants();
    loaded.clear();
    CHECK(loaded.num_free() == loaded.num_blocks());
  }

  void step() {
    try {
      act();
    } catch (const OutOfBlocks&) {
    } catch (const std::invalid_argument&) {
    }
  }

  void check() {
    cache_.check_invariants();
    for (auto& request : running_) verify(*request);
    const Stats stats = cache_.stats();
    CHECK(stats.lookup_tokens >= stats.hit_whole_tokens + stats.hit_partial_tokens);
    const Occupancy occupancy = cache_.occupancy();
    CHECK(occupancy.pinned_blocks == cache_.num_pinned() && occupancy.cached_blocks == cache_.num_cached());
    listen();
  }

 private:
  static constexpr std::uint32_t kCrowd = kFewNames + 4;

  struct Running {
    std::unique_ptr<Sequence> sequence = std::make_unique<Sequence>();
    bool awaits_copy = false;
  };

  static CacheOptions choose_options(Choices& choices) {
    CacheOptions options;
    const std::uint32_t sizes[] = {1, 3, 8, 20, 60, 400};
    options.num_blocks = sizes[choices.below(6)];
    options.block_size = 1 + choices.below(6);
    options.grain = choices.below(2) == 0 ? Grain::kToken : Grain::kBlock;
    const std::vector<std::string> policies = policy_names();
    options.policy = policies[choices.below(static_cast<std::uint32_t>(policies.size()))];
    const std::vector<std::string> hashes = {"fold64", "fold128"};
    options.hash = hashes[choices.below(2)];
    options.sharing = static_cast<Sharing>(choices.below(4));
    options.k = 2 + choices.below(2);
    options.thrash_window = choices.below(40);
    options.pin_budget = options.num_blocks / 2;
    return options;
  }

  void act() {
    now_ += 0.25 * choices_.below(8);
    cache_.set_time(now_);
    switch (choices_.below(16)) {
      case 0: case 1: case 2: return begin();
      case 3: case 4: case 5: return finish_some();
      case 6: return grow();
      case 7: return decode_all();
      case 8: return fork();
      case 9: case 10: return release();
      case 11: return look();
      case 12: return pin();
      case 13: return execute(cache_.resize(1 + choices_.below(2 * cache_.num_blocks())));
      case 14: return choices_.below(2) == 0 ? execute(cache_.compact()) : crowd();
      default: return rare();
    }
  }

  std::vector<Token> choose_tokens() {
    std::vector<Token> tokens(choices_.below(24));
    const std::uint32_t alphabet = 1 + choices_.below(3);
    for (Token& token : tokens) token = static_cast<Token>(choices_.below(alphabet));
    return tokens;
  }

  Prompt choose_prompt(const std::vector<Token>& tokens) {
    static const char* const kNames[] = {"", "a", "b"};
    Prompt prompt;
    prompt.tokens = tokens.data();
    prompt.count = tokens.size();
    prompt.space = kNames[choices_.below(2)];
    prompt.tenant = kNames[choices_.below(3)];
    if (tokens.size() > 4 && choices_.below(4) == 0) {
      prompt.content = {{1, 3 + choices_.below(2), kNames[1 + choices_.below(2)]}};
    }
    return prompt;
  }

  Running& choose() { return *running_[choices_.below(static_cast<std::uint32_t>(running_.size()))]; }

  // More namespaces and tenants than are remembered, each once.
  void crowd() {
    const Stats before = cache_.stats();
    for (std::uint32_t i = 0; i < kCrowd; ++i) {
      const std::string name = "crowd " + std::to_string(num_strangers_++);
      const Token token = 0;
      Prompt prompt;
      prompt.tokens = &token;
      prompt.count = 1;
      prompt.space = prompt.tenant = name;
      Sequence sequence;
      cache_.begin(sequence, prompt);
      cache_.release(sequence);
    }
    CHECK(cache_.stats().lookup_tokens == before.lookup_tokens + kCrowd);
    CHECK(cache_.spaces().size() <= kFewNames);
  }

  void begin() {
    const std::vector<Token> tokens = choose_tokens();
    auto request = std::make_unique<Running>();
    const Prompt prompt = choose_prompt(tokens);
    if (choices_.below(8) == 0) cache_.resume(*request->sequence, prompt);
    else cache_.begin(*request->sequence, prompt);
    running_.push_back(std::move(request));
  }

  void finish_some() {
    if (running_.empty()) return;
    Running& request = choose();
    const auto count = static_cast<std::uint32_t>(request.sequence->tokens.size());
    const std::uint32_t reach = choices_.below(3) == 0 ? choices_.below(count + 1) : count;
    execute(cache_.allocate(*request.sequence, reach));
    compute(request, reach);
  }

  void grow() {
    if (running_.empty()) return;
    Running& request = choose();
    const std::vector<Token> tokens = choose_tokens();
    cache_.append(*request.sequence, tokens.data(), tokens.size());
  }

  void decode_all() {
    std::vector<Sequence*> batch;
    std::vector<Token> tokens;
    for (auto& request : running_) {
      batch.push_back(request->sequence.get());
      tokens.push_back(static_cast<Token>(choices_.below(2)));
    }
    execute(cache_.append_and_allocate(batch, tokens.data()));
    for (auto& request : running_) compute(*request, static_cast<std::uint32_t>(request->sequence->tokens.size()));
  }

  void fork() {
    if (running_.empty()) return;
    Running& parent = choose();
    if (parent.awaits_copy) return;
    auto child = std::make_unique<Running>();
    cache_.fork(*parent.sequence, *child->sequence);
    child->awaits_copy = true;
    running_.push_back(std::move(child));
  }

  void release() {
    if (running_.empty()) return;
    const std::uint32_t i = choices_.below(static_cast<std::uint32_t>(running_.size()));
    cache_.release(*running_[i]->sequence);
    running_.erase(running_.begin() + i);
  }

  void look() {
    const std::vector<Token> tokens = choose_tokens();
    const Prompt prompt = choose_prompt(tokens);
    const Match match = cache_.match(prompt);
    CHECK(tokens.empty() ? match.num_tokens == 0 : match.num_tokens < tokens.size());
    CHECK(match.num_tokens == cache_.count_cached(prompt));
    const Explanation told = cache_.explain(prompt);
    CHECK(told.num_cached == match.num_tokens);
  }

  void pin() {
    if (pins_.empty() || choices_.below(2) == 0) {
      const std::vector<Token> tokens = choose_tokens();
      auto pin = std::make_unique<Sequence>();
      cache_.pin(*pin, choose_prompt(tokens));
      pins_.push_back(std::move(pin));
    }
    if (choices_.below(2) == 0) {
      cache_.release(*pins_.back());
      pins_.pop_back();
    }
  }

  void rare() {
    for (auto& pin : pins_) cache_.release(*pin);
    pins_.clear();
    const std::vector<Token> tokens = choose_tokens();
    switch (choices_.below(4)) {
      case 0: return cache_.clear();
      case 1: return hears_all_ ? listen() : cache_.enable_events(1 + choices_.below(50));
      case 2: return restart_as_it_was();
      default: return cache_.register_public(choose_prompt(tokens));
    }
  }

  // What is saved and loaded matches as before.
  void restart_as_it_was() {
    if (!running_.empty()) return;  // their own last blocks are not saved
    CacheOptions options = options_;
    options.num_blocks = cache_.num_blocks();
    PrefixCache loaded(options);
    const std::string file = cache_.save();
    loaded.load(file);
    loaded.check_invariants();
    CHECK(loaded.num_cached() == cache_.num_cached());
    const std::vector<Token> tokens = choose_tokens();
    const Prompt prompt = choose_prompt(tokens);
    CHECK(loaded.count_cached(prompt) == cache_.count_cached(prompt));
  }

  // A follower of all events knows every full block of the tree, each once, parents first.
  void listen() {
    for (const CacheEvent& event : cache_.take_events()) {
      if (!hears_all_) continue;
      if (event.kind == CacheEvent::Kind::kCleared) heard_.clear();
      for (std::size_t i = 0; i < event.blocks.size(); ++i) {
        const std::pair<SpaceId, std::uint64_t> block{event.space, event.blocks[i]};
        if (event.kind == CacheEvent::Kind::kRemoved) {
          CHECK(heard_.erase(block) == 1);
        } else {
          if (i == 0 && event.has_parent) CHECK(heard_.count({event.space, event.parent}) == 1);
          CHECK(heard_.insert(block).second);
        }
      }
      if (event.kind == CacheEvent::Kind::kStored) CHECK(event.tokens.size() == event.blocks.size() * cache_.block_size());
    }
    if (hears_all_) CHECK(heard_.size() == count_full_blocks());
  }

  // Of the tree, as its dump shows it: a line "  [start, end) blocks ..." for each node.
  std::size_t count_full_blocks() const {
    std::istringstream lines(cache_.dump());
    std::size_t count = 0;
    for (std::string line; std::getline(lines, line);) {
      unsigned start = 0, end = 0;
      if (std::sscanf(line.c_str(), " [%u, %u)", &start, &end) != 2) continue;
      count += end / cache_.block_size() - start / cache_.block_size();
    }
    return count;
  }

  void fit_kv() { kv_.resize(std::max<std::size_t>(kv_.size(), std::size_t{cache_.num_blocks()} * cache_.block_size())); }

  void execute(const std::vector<BlockCopy>& copies) {
    fit_kv();
    const std::uint32_t size = cache_.block_size();
    for (const BlockCopy& copy : copies) {
      CHECK(copy.num_slots <= size);
      for (std::uint32_t slot = 0; slot < copy.num_slots; ++slot) {
        kv_[copy.destination * size + slot] = kv_[copy.source * size + slot];
      }
    }
    for (auto& request : running_) request->awaits_copy = false;
  }

  // The KV of a token: a hash of its namespace and all tokens up to it.
  template <typename Visit>
  void for_each_slot(const Sequence& sequence, std::uint32_t count, Visit visit) {
    const std::uint32_t size = cache_.block_size();
    std::uint64_t kv = sequence.space + 1;
    for (std::uint32_t i = 0; i < count; ++i) {
      kv = (kv ^ static_cast<std::uint32_t>(sequence.tokens[i])) * 0x9E3779B97F4A7C15u;
      kv ^= kv >> 31;
      visit(i, kv_[sequence.table[i / size] * size + i % size], kv);
    }
  }

  void compute(Running& request, std::uint32_t reach) {
    Sequence& sequence = *request.sequence;
    for_each_slot(sequence, reach, [&](std::uint32_t i, std::uint64_t& slot, std::uint64_t kv) {
      if (i >= sequence.num_committed) slot = kv;
    });
    cache_.commit(sequence, reach);
    verify(request);
  }

  void verify(Running& request) {
    const Sequence& sequence = *request.sequence;
    if (request.awaits_copy || sequence.source != kNoNode) return;
    for_each_slot(sequence, sequence.num_committed,
                  [&](std::uint32_t, std::uint64_t& slot, std::uint64_t kv) { CHECK(slot == kv); });
  }

  Choices& choices_;
  const CacheOptions options_;
  PrefixCache cache_;
  const bool hears_all_;  // of the events, from the first on
  std::set<std::pair<SpaceId, std::uint64_t>> heard_;
  std::vector<std::unique_ptr<Running>> running_;
  std::vector<std::unique_ptr<Sequence>> pins_;
  std::vector<std::uint64_t> kv_;
  double now_ = 0.0;
  std::uint64_t num_strangers_ = 0;
};

}  // namespace caudex::test
