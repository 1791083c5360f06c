#pragma once

#include <vector>

#include "kernels/batch.hpp"

namespace caudex::kernels {

// Keys are attended to in partitions of 256 tokens, each with a softmax state of its own, folded together in ascending
// order. Partitions can thus run on several threads, and give the same bits when they run on one.
constexpr int kPartitionTokens = 256;

// Queries of one sequence within a tile.
struct TileMember {
  int sequence;
  int first_query;  // of the sequence's queries in this batch
  int num_queries;
};

// Consecutive members of a tile that find the tokens [first_token, end_token) in the same blocks and read them once.
struct TileRun {
  int first_member, end_member;  // within the tile
  int first_token, end_token;    // first_token is a multiple of 64
};

// Queries that are attended together. Several sequences share a tile where their block tables begin alike:
//
//   tokens      0          256         512
//   member 0    |==== run ====|== run ==|--- run ---|
//   member 1    |             |         |-- run --|
//   member 2    |             |         |----- run -----|
//                 partition 0   partition 1   partition 2
struct AttentionTile {
  std::vector<TileMember> members;
  std::vector<std::vector<TileRun>> partitions;
  int num_queries = 0;
  bool split = false;        // partitions are separate items, folded afterwards
  std::size_t partials = 0;  // of a split tile: where its states begin, in rows for one KV head

  int num_partitions() const { return static_cast<int>(partitions.size()); }
};

struct AttentionItem {
  int tile;
  int first_partition, end_partition;
};

// How a batch's attention is cut into items, made once a step and used by every layer. Any cut gives the same bits.
class AttentionPlan {
 public:
  // `group_size`: query heads for each KV head.
  AttentionPlan(const Batch& batch, int num_kv_heads, int group_size, int num_threads);

  const std::vector<AttentionTile>& tiles() const { return tiles_; }
  const std::vector<AttentionItem>& items() const { return items_; }
  const std::vector<int>& split_tiles() const { return split_tiles_; }
  int max_tile_queries() const { return max_tile_queries_; }
  std::size_t partial_rows() const { return partial_rows_; }  // for one KV head

 private:
  void add_long_sequence(int sequence, int tile_queries);
  void add_short_sequences(std::vector<int> sequences, int tile_queries);
  void add_partitions(AttentionTile& tile);
  void add_runs(AttentionTile& tile, int partition, int first_member, int end_member, int first_token, int end_token);
  void add_items(int num_kv_heads, int group_size, int num_threads);
  bool balances(int num_kv_heads, int num_threads) const;

  int last_token(const TileMember& member) const;
  bool same_blocks(int a, int b, int first_token, int end_token) const;

  const Batch& batch_;
  std::vector<AttentionTile> tiles_;
  std::vector<AttentionItem> items_;
  std::vector<int> split_tiles_;
  int max_tile_queries_ = 0;
  std::size_t partial_rows_ = 0;
};

}  // namespace caudex::kernels
