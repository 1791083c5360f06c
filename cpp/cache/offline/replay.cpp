#include "cache/offline/replay.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>

namespace caudex::offline {
namespace {

constexpr std::int64_t kRequestsBetweenReports = 256;

// A block's key is its number, which stands for all before it as it is, within its namespace.
class NumberedBlocks final : public BlockHasher {
 public:
  std::uint32_t key_bytes() const override { return sizeof(std::uint64_t); }

  void chain(const std::uint8_t* parent, const Token* tokens, std::uint32_t, std::uint8_t* key) const override {
    std::uint64_t value;
    std::memcpy(&value, parent, sizeof value);
    const std::uint64_t space = value >> 32;
    value = space << 32 | (space ^ static_cast<std::uint32_t>(tokens[0]));
    std::memcpy(key, &value, sizeof value);
  }

  void root(std::string_view space, std::uint8_t* key) const override {
    const std::uint64_t value = std::uint64_t{std::hash<std::string_view>()(space)} << 32;
    std::memcpy(key, &value, sizeof value);
  }
};

// One request's way through the cache. Returns the prompt tokens that it found there.
std::int64_t run(PrefixCache& cache, Sequence& sequence, const LoggedRequest& request, const std::string& tenant,
                 const SessionHints& hints) {
  if (request.prompt_length <= 0) return 0;
  const std::int64_t pool_tokens = std::int64_t{cache.num_blocks()} * cache.block_size();
  Prompt prompt;
  prompt.tokens = request.tokens;
  prompt.count = static_cast<std::size_t>(request.prompt_length);
  prompt.tenant = tenant;
  cache.begin(sequence, prompt);
  sequence.num_unseen_output = static_cast<Position>(request.unseen_output);
  sequence.hints = hints;
  const std::int64_t hit = sequence.num_cached;
  cache.append(sequence, request.tokens + request.prompt_length,
               static_cast<std::size_t>(request.length - request.prompt_length));
  const std::int64_t kept = std::min(request.kept_length, pool_tokens);
  if (kept > hit) {
    cache.allocate(sequence, static_cast<std::size_t>(kept));
    cache.commit(sequence, static_cast<std::size_t>(kept));
  }
  cache.release(sequence);
  return std::min(hit, request.hit_limit);
}

}  // namespace

LoggedRequest TokenLog::read(std::int64_t i) {
  const std::int64_t length = offsets_[i + 1] - offsets_[i];
  const std::int64_t prompt = std::min(prompt_lengths_[i], length);
  // The last generated token is never fed back, so its KV is not written.
  return {tokens_ + offsets_[i], length, prompt, prompt, length > prompt ? length - 1 : length, 0};
}

LoggedRequest BlockLog::read(std::int64_t i) {
  const Path path = log_.paths[i];
  tokens_.resize(std::size_t{path.length} + 1);
  log_.tree.for_each_upward(path, [&](const Stretch& stretch) {
    const auto first = tokens_.begin() + stretch.depth;
    std::iota(first, first + stretch.length, static_cast<Token>(stretch.begin));
  });
  const std::int64_t length = std::int64_t{path.length} + 1;
  return {tokens_.data(), length, length, reusable_[i], path.length, unseen_output_ == nullptr ? 0 : unseen_output_[i]};
}

void set_for_blocks(CacheOptions& options, std::int64_t tokens_per_block) {
  options.block_size = 1;
  options.tokens_per_id = static_cast<double>(tokens_per_block);
  options.hasher_factory = [] { return std::make_unique<NumberedBlocks>(); };
}

SessionHints RequestColumns::hints(std::int64_t i) const {
  SessionHints hints;
  if (sessions != nullptr && sessions[i] >= 0) hints.session = static_cast<std::uint64_t>(sessions[i]) + 1;
  if (expected_returns != nullptr) hints.expected_return = expected_returns[i];
  if (session_ends != nullptr) hints.ends = session_ends[i];
  if (priorities != nullptr) hints.priority = priorities[i];
  return hints;
}

ReplayResult replay(RequestSource& source, const RequestColumns& columns, const CacheOptions& options,
                    const Progress& progress) {
  PrefixCache cache(options);
  Sequence sequence;
  ReplayResult result;
  const std::int64_t num_requests = source.num_requests();
  result.hit_tokens.resize(static_cast<std::size_t>(num_requests));
  std::string tenant;
  double now = 0.0;
  for (std::int64_t i = 0; i < num_requests; ++i) {
    if (i % kRequestsBetweenReports == 0) progress(i);
    const double time = columns.times == nullptr ? static_cast<double>(i) : columns.times[i];
    now = i == 0 ? time : std::max(now, time);  // a clock does not run backwards
    cache.set_time(now);
    if (columns.tenants != nullptr) tenant = std::to_string(columns.tenants[i]);
    result.hit_tokens[i] = run(cache, sequence, source.read(i), tenant, columns.hints(i));
  }
  progress(num_requests);
  result.stats = cache.stats();
  result.num_cached_blocks = cache.num_cached();
  return result;
}

}  // namespace caudex::offline
