// Paged attention on every instruction set this machine has, beside a softmax in double over the same slots.
#include "kernels/paged_attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "check.hpp"
#include "kernel_values.hpp"
#include "kernels/isa.hpp"

using namespace caudex::kernels;
using caudex::test::Values;

namespace {

using Table = std::vector<std::int32_t>;

constexpr int kLayer = 1, kNumLayers = 2;

struct Shape {
  DType dtype, kv_dtype;
  int block_size, num_kv_heads, group_size, head_dim;

  int num_heads() const { return num_kv_heads * group_size; }
  int kv_row() const { return num_kv_heads * head_dim; }
  int query_row() const { return num_heads() * head_dim; }
};

// The newest queries of a sequence that one step computes.
struct Piece {
  int sequence, first, end;
};

float uniform(std::mt19937& random) { return std::uniform_real_distribution<float>(-1.0f, 1.0f)(random); }

// Sequences over one pool of slots. Some begin with the blocks of an earlier one; slots beyond every sequence hold NaN.
class World {
 public:
  World(const Shape& shape, std::mt19937& random)
      : shape(shape),
        num_blocks(600 / shape.block_size + 2),
        scale((random() % 2 == 0 ? 1.0f : 6.0f) / std::sqrt(static_cast<float>(shape.head_dim))),
        keys(shape.dtype, num_slots() * shape.kv_row()),
        values(shape.dtype, num_slots() * shape.kv_row()) {
    const int num_sequences = 1 + static_cast<int>(random() % 8);
    for (int i = 0; i < num_sequences; ++i) add_sequence(random);
    std::vector<bool> in_use(num_slots());
    for (std::size_t s = 0; s < tables.size(); ++s) {
      for (int position = 0; position < lengths[s]; ++position) in_use[slot(s, position)] = true;
    }
    for (int i = 0; i < num_slots() * shape.kv_row(); ++i) {
      const bool used = in_use[i / shape.kv_row()];
      keys.set(i, used ? uniform(random) : std::numeric_limits<float>::quiet_NaN());
      values.set(i, used ? uniform(random) : std::numeric_limits<float>::quiet_NaN());
    }
  }

  int num_slots() const { return num_blocks * shape.block_size; }
  int slot(std::size_t sequence, int position) const {
    return tables[sequence][position / shape.block_size] * shape.block_size + position % shape.block_size;
  }

  const Shape shape;
  const int num_blocks;
  const float scale;
  Values keys, values;  // [slots][KV heads][head_dim]
  std::vector<Table> tables;
  std::vector<int> lengths;
  std::vector<Values> queries;  // of each sequence: [positions][heads][head_dim]

 private:
  void add_sequence(std::mt19937& random) {
    const int limits[] = {3, 40, 200, 580};
    const int length = 1 + static_cast<int>(random() % limits[random() % 4]);
    Table table((length + shape.block_size - 1) / shape.block_size);
    for (std::int32_t& block : table) block = static_cast<std::int32_t>(random() % num_blocks);
    if (!tables.empty() && random() % 4 != 0) {
      const Table& parent = tables[random() % tables.size()];
      const std::size_t shared = random() % (std::min(parent.size(), table.size()) + 1);
      std::copy_n(parent.begin(), shared, table.begin());
    }
    tables.push_back(table);
    lengths.push_back(length);
    queries.emplace_back(shape.dtype, length * shape.query_row());
    for (int i = 0; i < length * shape.query_row(); ++i) queries.back().set(i, uniform(random));
  }
};

Batch batch_of(const World& world, const std::vector<Piece>& pieces) {
  std::vector<Table> tables;
  Table query_lens, context_lens;
  for (const Piece& piece : pieces) {
    tables.push_back(world.tables[piece.sequence]);
    query_lens.push_back(piece.end - piece.first);
    context_lens.push_back(piece.end);
  }
  return Batch(std::move(tables), query_lens, context_lens, world.shape.block_size, world.num_blocks);
}

// A pool that holds the world's slots in `kLayer`, written as one sequence over all blocks in order.
KvPool filled_pool(const World& world, const KernelTable& kernels, ThreadPool& threads) {
  const Shape& shape = world.shape;
  const KvLayout layout(kNumLayers, shape.block_size, shape.num_kv_heads, shape.head_dim, shape.dtype, shape.kv_dtype);
  KvPool pool(layout, world.num_blocks, kernels);
  Table all(world.num_blocks);
  std::iota(all.begin(), all.end(), 0);
  const Batch batch({all}, {world.num_slots()}, {world.num_slots()}, shape.block_size, world.num_blocks);
  pool.write(kLayer, {world.keys.at(0), shape.kv_row(), shape.head_dim},
             {world.values.at(0), shape.kv_row(), shape.head_dim}, batch, threads);
  return pool;
}

// The pieces' outputs in one step, put into their places of `outputs`.
void attend(PagedAttention& attention, const World& world, const std::vector<Piece>& pieces, int num_threads,
            std::vector<Values>& outputs) {
  const Shape& shape = world.shape;
  const Batch batch = batch_of(world, pieces);
  const AttentionPlan plan(batch, shape.num_kv_heads, shape.group_size, num_threads);
  Values query(shape.dtype, batch.num_rows() * shape.query_row()), output = query;
  const std::size_t row_bytes = shape.query_row() * element_size(shape.dtype);
  std::size_t row = 0;
  for (const Piece& piece : pieces) {
    const char* source = world.queries[piece.sequence].at(piece.first * shape.query_row());
    std::memcpy(query.at(row * shape.query_row()), source, (piece.end - piece.first) * row_bytes);
    row += piece.end - piece.first;
  }
  attention.run(kLayer, {query.at(0), shape.query_row(), shape.head_dim}, output.at(0), batch, plan, shape.group_size,
                world.scale);
  row = 0;
  for (const Piece& piece : pieces) {
    char* target = outputs[piece.sequence].at(piece.first * shape.query_row());
    std::memcpy(target, output.at(row * shape.query_row()), (piece.end - piece.first) * row_bytes);
    row += piece.end - piece.first;
  }
}

std::vector<Values> unwritten(const World& world) {
  std::vector<Values> outputs;
  for (const int length : world.lengths) outputs.emplace_back(world.shape.dtype, length * world.shape.query_row());
  return outputs;
}

// Every sequence's pieces, in steps of any make-up: each step takes the next piece of some sequences.
void attend_in_chunks(PagedAttention& attention, const World& world, int most, int num_threads, std::mt19937& random,
                      std::vector<Values>& outputs) {
  std::vector<int> done(world.tables.size());
  for (bool more = true; more;) {
    std::vector<Piece> pieces;
    more = false;
    for (std::size_t s = 0; s < done.size(); ++s) {
      const int left = world.lengths[s] - done[s];
      if (left > 0 && random() % 3 != 0) {
        const int count = std::min(left, 1 + static_cast<int>(random() % most));
        pieces.push_back({static_cast<int>(s), done[s], done[s] + count});
        done[s] += count;
      }
      more = more || done[s] < world.lengths[s];
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    attend(attention, world, pieces, num_threads, outputs);
  }
}

// One row's softmax in double. Values are below 1; off by roundings of scores and weights: 2^-13 with float32; with
// bfloat16 the weights and the result are rounded to 8 bits each, which makes 2^-7; in int8 all is rounded to 7 or 8
// bits, and scores that are wrong by 2^-6 of their largest make weights wrong by that times the scale.
void check_row(const World& world, int sequence, int position, int head, const Values& outputs) {
  const Shape& shape = world.shape;
  const int kv_head = head / shape.group_size, dim = shape.head_dim;
  const std::size_t row = static_cast<std::size_t>(position) * shape.query_row() + head * dim;
  std::vector<double> weights(position + 1), expected(dim);
  for (int p = 0; p <= position; ++p) {
    const std::size_t key = static_cast<std::size_t>(world.slot(sequence, p)) * shape.kv_row() + kv_head * dim;
    for (int i = 0; i < dim; ++i) weights[p] += double(world.queries[sequence][row + i]) * world.keys[key + i];
  }
  const double top = *std::max_element(weights.begin(), weights.end());
  double total = 0.0;
  for (double& weight : weights) total += weight = std::exp((weight - top) * world.scale);
  for (int p = 0; p <= position; ++p) {
    const std::size_t value = static_cast<std::size_t>(world.slot(sequence, p)) * shape.kv_row() + kv_head * dim;
    for (int i = 0; i < dim; ++i) expected[i] += weights[p] / total * world.values[value + i];
  }
  const double tolerance = shape.kv_dtype == DType::kInt8      ? 0.2
                           : shape.dtype == DType::kFloat32 ? std::ldexp(1.0, -13)
                                                            : std::ldexp(1.0, -7);
  for (int i = 0; i < dim; ++i) CHECK(std::abs(outputs[row + i] - expected[i]) <= tolerance);
}

void check_rows(const World& world, const std::vector<Values>& outputs, std::mt19937& random) {
  for (std::size_t s = 0; s < outputs.size(); ++s) {
    const int length = world.lengths[s];
    for (int i = 0; i < 12; ++i) {
      const int position = i == 0 ? 0 : i == 1 ? length - 1 : static_cast<int>(random() % length);
      check_row(world, static_cast<int>(s), position, static_cast<int>(random() % world.shape.num_heads()), outputs[s]);
    }
  }
}

bool same_bits(const World& world, const std::vector<Values>& a, const std::vector<Values>& b) {
  for (std::size_t s = 0; s < a.size(); ++s) {
    const std::size_t bytes = world.lengths[s] * world.shape.query_row() * element_size(world.shape.dtype);
    if (std::memcmp(a[s].at(0), b[s].at(0), bytes) != 0) return false;
  }
  return true;
}

Shape random_shape(std::mt19937& random) {
  const auto pick = [&](std::initializer_list<int> of) { return of.begin()[random() % of.size()]; };
  const DType dtype = random() % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
  return {dtype, random() % 2 == 0 ? DType::kInt8 : dtype, pick({1, 5, 16, 32, 64, 128}), pick({1, 2, 3}),
          pick({1, 2, 3, 7}), pick({1, 8, 17, 64, 80})};
}

void outputs_are_right_and_the_same_however_computed() {
  std::mt19937 random(1);
  for (int round = 0; round < 60; ++round) {
    const World world(random_shape(random), random);
    std::vector<Values> of_first;
    for (const std::string& isa : available_isas()) {
      ThreadPool one(1), several(2 + static_cast<int>(random() % 3));
      const KvPool pool = filled_pool(world, kernels_for(isa), several);
      PagedAttention alone(pool, kernels_for(isa), one), shared(pool, kernels_for(isa), several);
      std::vector<Values> whole = unwritten(world), chunked = unwritten(world), stepped = unwritten(world);
      std::vector<Piece> pieces;
      for (int s = 0; s < static_cast<int>(world.lengths.size()); ++s) pieces.push_back({s, 0, world.lengths[s]});
      attend(alone, world, pieces, 1, whole);
      check_rows(world, whole, random);
      if (of_first.empty()) of_first = whole;
      if (world.shape.kv_dtype == DType::kInt8) CHECK(same_bits(world, whole, of_first));
      attend_in_chunks(shared, world, 200, several.num_threads(), random, chunked);
      CHECK(same_bits(world, whole, chunked));
      attend_in_chunks(alone, world, 4, 1, random, stepped);
      CHECK(same_bits(world, whole, stepped));
    }
  }
}

// The same tokens in blocks of every size give the same bits: chunks read in place or rearranged.
void the_block_size_does_not_matter() {
  std::mt19937 random(2);
  constexpr int kTokens = 150;
  for (const std::string& isa : available_isas()) {
    for (const auto& [dtype, kv_dtype] :
         {std::pair(DType::kFloat32, DType::kFloat32), std::pair(DType::kBFloat16, DType::kBFloat16),
          std::pair(DType::kFloat32, DType::kInt8), std::pair(DType::kBFloat16, DType::kInt8)}) {
      const Shape row{dtype, kv_dtype, 1, 2, 3, 33};
      Values keys(dtype, kTokens * row.kv_row()), values = keys, query(dtype, kTokens * row.query_row());
      for (int i = 0; i < kTokens * row.kv_row(); ++i) keys.set(i, uniform(random)), values.set(i, uniform(random));
      for (int i = 0; i < kTokens * row.query_row(); ++i) query.set(i, uniform(random));
      ThreadPool threads(2);
      std::vector<char> first;
      for (const int block_size : {1, 3, 16, 48, 100, 256}) {
        Table table((kTokens + block_size - 1) / block_size);
        std::iota(table.begin(), table.end(), 0);
        std::shuffle(table.begin(), table.end(), random);
        const int num_blocks = static_cast<int>(table.size());
        KvPool pool(KvLayout(kNumLayers, block_size, row.num_kv_heads, row.head_dim, dtype, kv_dtype), num_blocks,
                    kernels_for(isa));
        const Batch batch({table}, {kTokens}, {kTokens}, block_size, num_blocks);
        pool.write(kLayer, {keys.at(0), row.kv_row(), row.head_dim}, {values.at(0), row.kv_row(), row.head_dim}, batch,
                   threads);
        PagedAttention attention(pool, kernels_for(isa), threads);
        Values output = query;
        attention.run(kLayer, {query.at(0), row.query_row(), row.head_dim}, output.at(0), batch,
                      AttentionPlan(batch, row.num_kv_heads, row.group_size, 2), row.group_size, 0.2f);
        const std::vector<char> bytes(output.at(0), output.at(kTokens * row.query_row()));
        if (first.empty()) first = bytes;
        CHECK(bytes == first);
      }
    }
  }
}

// Queries of zeros weigh all they see alike; values of zeros and denormals come back as they were.
void zeros_weigh_alike() {
  constexpr int kTokens = 70, kDim = 16;
  for (const std::string& isa : available_isas()) {
    ThreadPool threads(1);
    KvPool pool(KvLayout(kNumLayers, 16, 1, kDim, DType::kFloat32, DType::kFloat32), 5, kernels_for(isa));
    Values keys(DType::kFloat32, kTokens * kDim), values = keys, query = keys, output = keys;
    for (int i = 0; i < kTokens * kDim; ++i) {
      keys.set(i, std::numeric_limits<float>::denorm_min());
      values.set(i, i % 2 == 0 ? 0.0f : static_cast<float>(i / kDim));
      query.set(i, 0.0f);
    }
    const Batch batch({{4, 0, 3, 1, 2}}, {kTokens}, {kTokens}, 16, 5);
    pool.write(kLayer, {keys.at(0), kDim, kDim}, {values.at(0), kDim, kDim}, batch, threads);
    PagedAttention attention(pool, kernels_for(isa), threads);
    attention.run(kLayer, {query.at(0), kDim, kDim}, output.at(0), batch, AttentionPlan(batch, 1, 1, 1), 1, 1.0f);
    for (int row = 0; row < kTokens; ++row) {
      CHECK(output[row * kDim] == 0.0f);
      CHECK(std::abs(output[row * kDim + 1] - 0.5f * row) <= 1e-5f * kTokens);
    }
  }
}

// Every query in one tile, every token a query sees in one run of blocks its sequence has, every partition in one item.
void check_plan(const World& world, const std::vector<Piece>& pieces, int num_threads) {
  const Batch batch = batch_of(world, pieces);
  const AttentionPlan plan(batch, world.shape.num_kv_heads, world.shape.group_size, num_threads);
  std::vector<int> planned(batch.num_rows());
  std::vector<std::vector<int>> items;
  for (const AttentionTile& tile : plan.tiles()) {
    items.emplace_back(tile.num_partitions());
    int queries = 0;
    for (std::size_t m = 0; m < tile.members.size(); ++m) {
      const TileMember& member = tile.members[m];
      const BatchSequence& sequence = batch.sequences()[member.sequence];
      queries += member.num_queries;
      for (int q = 0; q < member.num_queries; ++q) ++planned[sequence.query_start + member.first_query + q];
      const int sees = sequence.first_position() + member.first_query + member.num_queries;
      int token = 0;
      for (const auto& partition : tile.partitions) {
        for (const TileRun& run : partition) {
          if (static_cast<int>(m) < run.first_member || static_cast<int>(m) >= run.end_member) continue;
          CHECK(run.first_token == token && run.first_token % kStepTokens == 0);
          const Table& read = batch.sequences()[tile.members[run.first_member].sequence].blocks;
          for (; token < std::min(run.end_token, sees); ++token) {
            const std::size_t block = token / world.shape.block_size;
            CHECK(block < read.size() && read[block] == sequence.blocks[block]);
          }
        }
      }
      CHECK(token == sees);
    }
    CHECK(queries == tile.num_queries && queries <= plan.max_tile_queries());
  }
  CHECK(std::all_of(planned.begin(), planned.end(), [](int times) { return times == 1; }));
  for (const AttentionItem& item : plan.items()) {
    for (int p = item.first_partition; p < item.end_partition; ++p) ++items[item.tile][p];
  }
  for (const auto& tile : items) {
    CHECK(std::all_of(tile.begin(), tile.end(), [](int times) { return times == 1; }));
  }
}

void plans_cover_everything_once() {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    Shape shape = random_shape(random);
    shape.head_dim = 1;
    const World world(shape, random);
    std::vector<Piece> pieces;
    for (std::size_t s = 0; s < world.tables.size(); ++s) {
      const int end = 1 + static_cast<int>(random() % world.lengths[s]);
      const int count = random() % 2 == 0 ? 1 : 1 + static_cast<int>(random() % end);
      pieces.push_back({static_cast<int>(s), end - count, end});
    }
    check_plan(world, pieces, 1 + static_cast<int>(random() % 8));
  }
}

void an_impossible_batch_is_refused() {
  const auto refused = [](std::vector<Table> tables, const Table& query_lens, const Table& context_lens) {
    try {
      Batch(std::move(tables), query_lens, context_lens, 16, 8);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(!refused({}, {}, {}));
  CHECK(!refused({{7, 0}}, {1}, {32}));
  CHECK(refused({{7, 0}}, {0}, {0}));
  CHECK(refused({{7, 0}}, {0}, {32}));
  CHECK(refused({{7, 0}}, {33}, {32}));
  CHECK(refused({{7, 0}}, {1}, {33}));
  CHECK(refused({{8}}, {1}, {1}));
  CHECK(refused({{-1}}, {1}, {1}));
  CHECK(refused({{0}}, {1, 1}, {1}));
}

}  // namespace

int main() {
  an_impossible_batch_is_refused();
  plans_cover_everything_once();
  zeros_weigh_alike();
  the_block_size_does_not_matter();
  outputs_are_right_and_the_same_however_computed();
  std::puts("paged attention is sound");
  return 0;
}
