#include "cache/offline/replay.hpp"

#include <algorithm>
#include <string>

namespace caudex::offline {
namespace {

constexpr std::int64_t kRequestsBetweenReports = 256;

// One request's way through the cache. Returns the prompt tokens that it found there.
std::int64_t run(PrefixCache& cache, Sequence& sequence, const TokenTrace& trace, std::int64_t i) {
  const Token* tokens = trace.tokens + trace.offsets[i];
  const std::int64_t length = trace.offsets[i + 1] - trace.offsets[i];
  const std::int64_t prompt_length = std::min(trace.prompt_lengths[i], length);
  if (prompt_length <= 0) return 0;
  const std::string tenant = trace.tenants == nullptr ? std::string() : std::to_string(trace.tenants[i]);
  const std::int64_t pool_tokens = std::int64_t{cache.num_blocks()} * cache.block_size();

  Prompt prompt;
  prompt.tokens = tokens;
  prompt.count = static_cast<std::size_t>(prompt_length);
  prompt.tenant = tenant;
  cache.begin(sequence, prompt);
  if (trace.unseen_output != nullptr) sequence.num_unseen_output = static_cast<Position>(trace.unseen_output[i]);
  if (trace.hints != nullptr) sequence.hints = trace.hints[i];
  const std::int64_t hit = sequence.num_cached;
  cache.append(sequence, tokens + prompt_length, static_cast<std::size_t>(length - prompt_length));
  const std::int64_t kept = std::min({trace.kept_lengths[i], length, pool_tokens});
  if (kept > hit) {
    cache.allocate(sequence, static_cast<std::size_t>(kept));
    cache.commit(sequence, static_cast<std::size_t>(kept));
  }
  cache.release(sequence);
  return trace.hit_limits == nullptr ? hit : std::min(hit, trace.hit_limits[i]);
}

}  // namespace

ReplayResult replay(const TokenTrace& trace, const CacheOptions& options, const Progress& progress) {
  PrefixCache cache(options);
  Sequence sequence;
  ReplayResult result;
  result.hit_tokens.resize(static_cast<std::size_t>(trace.num_requests));
  double now = 0.0;
  for (std::int64_t i = 0; i < trace.num_requests; ++i) {
    if (i % kRequestsBetweenReports == 0) progress(i);
    now = i == 0 ? trace.times[0] : std::max(now, trace.times[i]);  // a clock does not run backwards
    cache.set_time(now);
    result.hit_tokens[i] = run(cache, sequence, trace, i);
  }
  progress(trace.num_requests);
  result.stats = cache.stats();
  result.num_cached_blocks = cache.num_cached();
  return result;
}

}  // namespace caudex::offline
