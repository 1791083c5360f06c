#include "kernels/attention_plan.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "kernels/kernel_table.hpp"

namespace caudex::kernels {
namespace {

// Rows (queries x heads) of a tile: enough to use a chunk of K and V many times while it is in the first-level cache,
// few enough that their own state stays there too.
constexpr int kTileRows = 48;

// Sequences with at most this many rows are memory-bound: sharing the reading of a common prefix pays.
constexpr int kSharingRows = 24;

// Tiles are kept in one piece where the busiest thread then has at most so much more than its share. Splitting costs
// what is written and read of the partitions' states.
constexpr double kImbalance = 1.1;

}  // namespace

AttentionPlan::AttentionPlan(const Batch& batch, int num_kv_heads, int group_size, int num_threads) : batch_(batch) {
  const int tile_queries = std::max(1, kTileRows / group_size);
  std::vector<int> short_sequences;
  const auto& sequences = batch.sequences();
  for (int i = 0; i < static_cast<int>(sequences.size()); ++i) {
    if (sequences[i].query_len * group_size <= kSharingRows || sequences[i].query_len == 1) {
      short_sequences.push_back(i);
    } else {
      add_long_sequence(i, tile_queries);
    }
  }
  add_short_sequences(std::move(short_sequences), tile_queries);
  for (AttentionTile& tile : tiles_) add_partitions(tile);
  add_items(num_kv_heads, group_size, num_threads);
}

void AttentionPlan::add_long_sequence(int sequence, int tile_queries) {
  const int query_len = batch_.sequences()[sequence].query_len;
  for (int first = 0; first < query_len; first += tile_queries) {
    const int count = std::min(tile_queries, query_len - first);
    tiles_.emplace_back();
    tiles_.back().members.push_back({sequence, first, count});
    tiles_.back().num_queries = count;
  }
}

// Sequences sorted by block table lie next to those that share the most with them.
void AttentionPlan::add_short_sequences(std::vector<int> sequences, int tile_queries) {
  const auto& all = batch_.sequences();
  std::sort(sequences.begin(), sequences.end(), [&](int a, int b) {
    return all[a].blocks != all[b].blocks ? all[a].blocks < all[b].blocks : a < b;
  });
  int previous = -1;
  for (const int sequence : sequences) {
    const int count = all[sequence].query_len;
    const bool shares = previous >= 0 && all[previous].context_len >= kStepTokens &&
                        all[sequence].context_len >= kStepTokens && same_blocks(previous, sequence, 0, kStepTokens);
    if (!shares || tiles_.back().num_queries + count > tile_queries) tiles_.emplace_back();
    tiles_.back().members.push_back({sequence, 0, count});
    tiles_.back().num_queries += count;
    previous = sequence;
  }
}

int AttentionPlan::last_token(const TileMember& member) const {
  return batch_.sequences()[member.sequence].first_position() + member.first_query + member.num_queries - 1;
}

bool AttentionPlan::same_blocks(int a, int b, int first_token, int end_token) const {
  const BatchSequence& left = batch_.sequences()[a];
  const BatchSequence& right = batch_.sequences()[b];
  const int block_size = batch_.block_size();
  const auto end_block = [&](const BatchSequence& s) {
    return (std::min(end_token, s.context_len) + block_size - 1) / block_size;
  };
  const int first = first_token / block_size, end = end_block(left);
  return end == end_block(right) &&
         std::equal(left.blocks.begin() + first, left.blocks.begin() + end, right.blocks.begin() + first);
}

void AttentionPlan::add_partitions(AttentionTile& tile) {
  int end = 0;
  for (const TileMember& member : tile.members) end = std::max(end, last_token(member) + 1);
  tile.partitions.resize((end + kPartitionTokens - 1) / kPartitionTokens);
  for (int p = 0; p < tile.num_partitions(); ++p) {
    const int first = p * kPartitionTokens;
    add_runs(tile, p, 0, static_cast<int>(tile.members.size()), first, std::min(end, first + kPartitionTokens));
  }
  max_tile_queries_ = std::max(max_tile_queries_, tile.num_queries);
}

// Follow the members' common blocks step by step; where they part, go on with each group by itself.
void AttentionPlan::add_runs(AttentionTile& tile, int partition, int first_member, int end_member, int first_token,
                             int end_token) {
  int group = first_member;
  for (int member = first_member; member < end_member; group = member) {
    const auto ends_before = [&](int m, int token) { return last_token(tile.members[m]) < token; };
    if (ends_before(group, first_token)) {
      ++member;
      continue;
    }
    const auto agrees = [&](int m, int token) {
      return !ends_before(m, token) && same_blocks(tile.members[group].sequence, tile.members[m].sequence, token,
                                                   std::min(token + kStepTokens, end_token));
    };
    while (member < end_member && agrees(member, first_token)) ++member;
    int token = first_token;
    const auto all_agree = [&] {
      for (int m = group; m < member; ++m) {
        if (!agrees(m, token)) return false;
      }
      return true;
    };
    while (token < end_token && all_agree()) token += kStepTokens;
    tile.partitions[partition].push_back({group, member, first_token, std::min(token, end_token)});
    if (token < end_token) add_runs(tile, partition, group, member, token, end_token);
  }
}

// Whether whole tiles, the longest first to whichever thread is free, occupy all threads about equally long.
bool AttentionPlan::balances(int num_kv_heads, int num_threads) const {
  if (num_threads == 1) return true;
  std::vector<double> costs, loads(num_threads, 0.0);
  for (const AttentionTile& tile : tiles_) {
    costs.insert(costs.end(), num_kv_heads, static_cast<double>(tile.num_partitions()) * tile.num_queries);
  }
  std::sort(costs.begin(), costs.end(), std::greater<>());
  for (const double cost : costs) *std::min_element(loads.begin(), loads.end()) += cost;
  const double total = std::accumulate(loads.begin(), loads.end(), 0.0);
  return *std::max_element(loads.begin(), loads.end()) <= kImbalance * total / num_threads;
}

void AttentionPlan::add_items(int num_kv_heads, int group_size, int num_threads) {
  const bool split = !balances(num_kv_heads, num_threads);
  for (int t = 0; t < static_cast<int>(tiles_.size()); ++t) {
    AttentionTile& tile = tiles_[t];
    if (!split || tile.num_partitions() == 1) {
      items_.push_back({t, 0, tile.num_partitions()});
      continue;
    }
    tile.split = true;
    tile.partials = partial_rows_;
    partial_rows_ += static_cast<std::size_t>(tile.num_partitions()) * tile.num_queries * group_size;
    split_tiles_.push_back(t);
    for (int p = 0; p < tile.num_partitions(); ++p) items_.push_back({t, p, p + 1});
  }
  // The longest first, so that no thread is left with one at the end.
  const auto cost = [&](const AttentionItem& item) {
    return (item.end_partition - item.first_partition) * tiles_[item.tile].num_queries;
  };
  std::stable_sort(items_.begin(), items_.end(),
                   [&](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
}

}  // namespace caudex::kernels
