#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cache/offline/block_paths.hpp"
#include "cache/prefix_cache.hpp"

namespace caudex::offline {

// A request as a replay runs it: first its prompt, then what was generated for it.
struct LoggedRequest {
  const Token* tokens;
  std::int64_t length;
  std::int64_t prompt_length;   // at most `length`
  std::int64_t hit_limit;       // tokens that count as served at most
  std::int64_t kept_length;     // leading tokens whose KV is written, so that they can be matched later
  std::int64_t unseen_output;   // tokens generated but not in the log
};

// A log, request by request. The tokens stay where they are until the next read().
class RequestSource {
 public:
  virtual ~RequestSource() = default;
  virtual std::int64_t num_requests() const = 0;
  virtual LoggedRequest read(std::int64_t i) = 0;
};

// A borrowed view of flat arrays. Request i is tokens[offsets[i] .. offsets[i + 1]).
class TokenLog final : public RequestSource {
 public:
  TokenLog(const Token* tokens, const std::int64_t* offsets, const std::int64_t* prompt_lengths, std::int64_t num_requests)
      : tokens_(tokens), offsets_(offsets), prompt_lengths_(prompt_lengths), num_requests_(num_requests) {}

  std::int64_t num_requests() const override { return num_requests_; }
  LoggedRequest read(std::int64_t i) override;

 private:
  const Token* tokens_;
  const std::int64_t* offsets_;
  const std::int64_t* prompt_lengths_;
  std::int64_t num_requests_;
};

// Block numbers as tokens, for a cache with a block size of 1; and one token more, which is never kept. The cache
// leaves the last token of a prompt to compute: here that one. A prompt that ends with a full block computes it again,
// which is no hit; but its copy in the cache, if there is one, is the request's own and protected.
class BlockLog final : public RequestSource {
 public:
  // `unseen_output` may be null: none.
  BlockLog(const BlockPaths& log, const std::int64_t* reusable, const std::int64_t* unseen_output)
      : log_(log), reusable_(reusable), unseen_output_(unseen_output) {}

  std::int64_t num_requests() const override { return log_.num_requests(); }
  LoggedRequest read(std::int64_t i) override;

 private:
  const BlockPaths& log_;
  const std::int64_t* reusable_;
  const std::int64_t* unseen_output_;
  std::vector<Token> tokens_;
};

// Makes `options` those of a cache for a BlockLog: a block is one token, which stands for `tokens_per_block`.
void set_for_blocks(CacheOptions& options, std::int64_t tokens_per_block);

// What else is known of each request. Null for what the log does not have.
struct RequestColumns {
  const double* times = nullptr;  // seconds
  const std::int64_t* tenants = nullptr;
  const std::int64_t* sessions = nullptr;      // negative: unknown
  const double* expected_returns = nullptr;    // seconds; negative: unknown
  const bool* session_ends = nullptr;
  const double* priorities = nullptr;

  SessionHints hints(std::int64_t i) const;
};

// Called now and then with the number of requests done; throws to stop.
using Progress = std::function<void(std::int64_t)>;

struct ReplayResult {
  std::vector<std::int64_t> hit_tokens;  // by request: prompt tokens served from the cache, partial hits included
  Stats stats;
  std::uint32_t num_cached_blocks = 0;  // at the end
};

// Runs the requests of a log through a new cache, one after another, each finished before the next begins, on the log's
// clock; without times they are one second apart. A request that is longer than the whole pool keeps as many of its
// first blocks as there are. Costs what the cache costs, and little else.
ReplayResult replay(RequestSource& source, const RequestColumns& columns, const CacheOptions& options,
                    const Progress& progress);

}  // namespace caudex::offline
