// SGLang's radix cache, rule by rule: to predict its hits, not to serve with.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "cache/types.hpp"

namespace caudex::parity {

struct SglangNode;

// A request in SGLang's scheduler.
struct SglangRequest {
  std::vector<Token> tokens;
  SglangNode* node = nullptr;  // where its lock lies
  std::size_t num_cached = 0;
  std::size_t in_tree = 0;    // its first tokens, whose slots the tree owns
  std::size_t allocated = 0;  // slots, the tree's included
  bool running = false;
};

// The rules of version 0.5.23 with the policy lru:
//   * a look-up is floored to whole pages and capped at length - 1; it touches every node it passes, also the rest of one
//     that it matches in part, which is split there;
//   * the path is locked; only unlocked leaves are evicted, whole, by last access, until enough tokens are free;
//   * what is committed is inserted in whole pages; the slots of what was there already are freed;
//   * at the end the slots beyond the tree are freed and the lock is taken back.
class SglangCache {
 public:
  SglangCache(std::uint32_t num_pages, std::uint32_t page_size);
  ~SglangCache();

  std::size_t begin(SglangRequest& request, const Token* tokens, std::size_t count);
  // Slots for the first `num_tokens` tokens. Throws OutOfBlocks and changes nothing.
  void allocate(SglangRequest& request, std::size_t num_tokens);
  void append(SglangRequest& request, const Token* tokens, std::size_t count);
  void commit(SglangRequest& request, std::size_t num_tokens);
  void release(SglangRequest& request);
  // Forgets all that is cached, if no request runs; else does nothing and says so.
  bool reset();

  // A leaf that may go: the tokens from the root to its end, of which it holds the last `num_own`.
  struct Leaf {
    std::vector<Token> tokens;
    std::size_t num_own;
  };
  // As they are now, the next to go first. Parents take their turn once their leaves have gone.
  std::vector<Leaf> eviction_order() const;

  std::size_t num_free() const { return free_ / page_size_; }            // pages
  std::size_t num_evictable() const { return evictable_ / page_size_; }  // pages
  std::uint32_t page_size() const { return page_size_; }
  std::uint64_t num_evicted() const { return num_evicted_; }

 private:
  SglangNode* match(const Token* tokens, std::size_t count, std::size_t& matched);
  std::size_t insert(const Token* tokens, std::size_t count);
  SglangNode* split(SglangNode* node, std::size_t length);
  std::size_t floor(std::size_t count) const { return count - count % page_size_; }
  void touch(SglangNode* node, std::uint64_t time);
  void lock(SglangNode* node);
  void unlock(SglangNode* node);
  void update_leaf(SglangNode* node);
  void evict(std::size_t num_tokens);
  Leaf describe(const SglangNode* leaf) const;

  struct Older {
    bool operator()(const SglangNode* a, const SglangNode* b) const;
  };

  std::uint32_t page_size_;
  std::unique_ptr<SglangNode> root_;
  std::set<SglangNode*, Older> leaves_;  // evictable
  std::size_t num_slots_;                // tokens
  std::size_t free_;                     // tokens
  std::size_t evictable_ = 0;            // tokens
  std::uint64_t clock_ = 0;
  std::uint64_t num_evicted_ = 0;  // tokens
};

}  // namespace caudex::parity
