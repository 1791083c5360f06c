// The core's parts by themselves.
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include "cache/block_run.hpp"
#include "cache/child_table.hpp"
#include "cache/digests.hpp"
#include "cache/ghost_runs.hpp"
#include "cache/ghosts.hpp"
#include "cache_player.hpp"

using namespace caudex;

namespace {

std::string hex(const std::uint8_t* bytes, std::size_t count) {
  std::string text;
  char two[3];
  for (std::size_t i = 0; i < count; ++i) {
    std::snprintf(two, sizeof two, "%02x", bytes[i]);
    text += two;
  }
  return text;
}

void digests_are_the_published_ones() {
  std::uint8_t out[kDigestBytes];
  const auto* abc = reinterpret_cast<const std::uint8_t*>("abc");
  sha256(abc, 3, out);
  CHECK(hex(out, 32) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  blake3(abc, 0, out);
  CHECK(hex(out, 32) == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262");
  blake3(abc, 3, out);
  CHECK(hex(out, 32) == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85");
}

void a_child_table_is_a_map() {
  std::mt19937 random(1);
  ChildTable table;
  std::map<std::pair<NodeId, std::uint32_t>, NodeId> twin;
  for (int i = 0; i < 200'000; ++i) {
    const std::pair<NodeId, std::uint32_t> key{random() % 500, random() % 3};
    auto found = twin.find(key);
    const NodeId expected = found == twin.end() ? kNoNode : found->second;
    CHECK(table.find(key.first, key.second, [&](NodeId child) { return child == expected; }) == expected);
    if (found == twin.end()) {
      twin[key] = static_cast<NodeId>(i + 1);
      table.insert(key.first, key.second, static_cast<NodeId>(i + 1));
    } else if (random() % 2 == 0) {
      table.erase(key.first, key.second, found->second);
      twin.erase(found);
    }
    CHECK(table.size() == twin.size());
  }
}

void a_block_run_is_a_vector() {
  std::mt19937 random(4);
  BlockRun run;
  std::vector<BlockId> twin;
  for (BlockId i = 0; i < 100'000; ++i) {
    const std::uint32_t choice = random() % 8;
    if (choice < 3) {
      const BlockId blocks[] = {i, i + 1, i + 2};
      run.append(blocks, choice + 1);
      twin.insert(twin.end(), blocks, blocks + choice + 1);
    } else if (choice < 7 && !twin.empty()) {
      CHECK(run.pop_back() == twin.back());
      twin.pop_back();
    } else {
      const std::size_t count = random() % (twin.size() + 1);
      const BlockRun front = run.split_front(static_cast<std::uint32_t>(count));
      CHECK(std::equal(front.begin(), front.end(), twin.begin(), twin.begin() + count));
      twin.erase(twin.begin(), twin.begin() + count);
      if (random() % 2 == 0) run = BlockRun(), twin.clear();
    }
    CHECK(std::equal(run.begin(), run.end(), twin.begin(), twin.end()));
    CHECK((run.heap_bytes() > 0) == (twin.size() > 2));
  }
}

void equal_labels_are_told_apart_by_the_caller() {
  ChildTable table;
  for (NodeId child = 1; child <= 50; ++child) table.insert(7, 8, child);
  for (NodeId child = 1; child <= 50; child += 2) table.erase(7, 8, child);
  for (NodeId child = 1; child <= 50; ++child) {
    CHECK(table.find(7, 8, [&](NodeId found) { return found == child; }) == (child % 2 == 0 ? child : kNoNode));
  }
}

void ghosts_remember_the_last_ones() {
  std::mt19937 random(2);
  const std::size_t window = 40;
  Ghosts<int> ghosts(window);
  std::vector<std::pair<std::uint64_t, int>> twin;  // the oldest first; taken ones are marked by -1
  for (int i = 0; i < 100'000; ++i) {
    const std::uint64_t fingerprint = random() % 100;
    auto found = std::find_if(twin.begin(), twin.end(),
                              [&](auto& entry) { return entry.first == fingerprint && entry.second >= 0; });
    const int* value = ghosts.find(fingerprint);
    CHECK((value == nullptr) == (found == twin.end()));
    if (value != nullptr) CHECK(*value == found->second);
    if (random() % 3 == 0) {
      const std::optional<int> taken = ghosts.take(fingerprint);
      CHECK(taken.has_value() == (found != twin.end()));
      if (found != twin.end()) CHECK(*taken == std::exchange(found->second, -1));
    } else {
      const std::optional<int> forgotten = ghosts.add(fingerprint, i);
      if (found != twin.end()) {
        CHECK(forgotten == std::exchange(found->second, i));
        continue;
      }
      twin.emplace_back(fingerprint, i);
      const bool full = twin.size() > window;
      CHECK(forgotten.has_value() == (full && twin.front().second >= 0));
      if (forgotten) CHECK(*forgotten == twin.front().second);
      if (full) twin.erase(twin.begin());
    }
  }
}

// Paths that lose blocks from their ends and get them back in part, beside a list that remembers block by block.
void ghost_runs_remember_the_last_blocks() {
  constexpr std::uint32_t kPaths = 12, kLength = 20, kWindow = 60;
  struct Remembered {
    std::uint64_t block;
    std::uint32_t path;
    bool live;
  };
  std::mt19937_64 random(3);
  std::vector<std::uint64_t> blocks(kPaths * kLength);
  for (std::uint64_t& block : blocks) block = random();
  GhostRuns<std::uint32_t> ghosts(kWindow);
  std::vector<Remembered> twin;  // the oldest first
  std::vector<std::uint32_t> cached(kPaths, kLength);
  for (int i = 0; i < 100'000; ++i) {
    const std::uint32_t path = random() % kPaths;
    const std::uint64_t* of_path = blocks.data() + path * kLength;
    std::uint32_t count = random() % 8;
    if (random() % 2 == 0) {
      std::vector<std::uint64_t> evicted;
      for (; evicted.size() < count && cached[path] > 0;) evicted.push_back(of_path[--cached[path]]);
      std::vector<std::uint32_t> lost(kPaths), expected(kPaths);
      const auto forget = [&](std::uint32_t value, std::uint32_t number) { lost[value] += number; };
      const std::uint32_t* newest = ghosts.newest();
      if (newest != nullptr && *newest == path) ghosts.extend(evicted.data(), evicted.size(), forget);
      else ghosts.add(evicted.data(), evicted.size(), path, forget);
      for (std::uint64_t block : evicted) twin.push_back({block, path, true});
      for (; twin.size() > kWindow; twin.erase(twin.begin())) expected[twin.front().path] += twin.front().live;
      CHECK(lost == expected);
    } else {
      count = std::min(count, kLength - cached[path]);
      std::uint32_t known = 0;
      while (known < count) {
        const auto found = ghosts.find(of_path + cached[path] + known, count - known);
        const auto taken = ghosts.take(of_path + cached[path] + known, count - known);
        CHECK(found.count == taken.count && (taken.count == 0 || taken.value == path));
        if (taken.count == 0) break;
        known += taken.count;
      }
      std::uint32_t expected = 0;
      for (; expected < count; ++expected) {
        const auto entry = std::find_if(twin.begin(), twin.end(), [&](const Remembered& remembered) {
          return remembered.live && remembered.block == of_path[cached[path] + expected];
        });
        if (entry == twin.end()) break;
        entry->live = false;
      }
      CHECK(known == expected);
      cached[path] += count;
    }
  }
}

// Hashes so weak that everything collides: nothing may match but what is equal.
class WeakHasher final : public BlockHasher {
 public:
  std::uint32_t key_bytes() const override { return 8; }
  void chain(const std::uint8_t*, const Token*, std::uint32_t, std::uint8_t* key) const override { std::memset(key, 1, 8); }
  void root(std::string_view, std::uint8_t* key) const override { std::memset(key, 1, 8); }
};

void a_collision_is_a_miss() {
  WeakHasher hasher;
  BlockPool pool(64, 2, hasher.key_bytes());
  Audiences audiences(0);
  BlockTree tree(Grain::kBlock, pool, hasher, audiences);
  const double now = 0.0;
  tree.use_policy(make_policy("lru", {tree.nodes(), pool, now}));
  const NodeId root = tree.add_root(0, "");
  std::set<std::vector<Token>> stored;
  for (Token a = 0; a < 5; ++a) {
    for (Token b = 0; b < 5; ++b) {
      const std::vector<Token> tokens = {a, b};
      const BlockId block = pool.take();
      std::copy(tokens.begin(), tokens.end(), pool.tokens(block));
      hasher.chain(nullptr, nullptr, 0, pool.key(block));
      CHECK(tree.walk(root, tokens.data(), 2, kOperator).end == 0);
      tree.anchor(root);
      const NodeId leaf = tree.add_leaf(root, 2, &block, 1, kEveryone);
      tree.descend(root, leaf);
      tree.release(leaf);
      CHECK(tree.walk(root, tokens.data(), 2, kOperator).node == leaf);
    }
  }
  for (BlockId block; tree.num_cached() > 0; pool.give(block)) tree.evict(1, &block);
  CHECK(tree.nodes().count() == 1);
}

void a_million_children_cost_no_more_than_two() {
  CacheOptions options;
  options.num_blocks = 200'000;
  options.block_size = 1;
  PrefixCache cache(options);
  for (Token token = 0; token < 150'000; ++token) {
    const Token tokens[] = {token, 1};
    Sequence sequence;
    Prompt prompt;
    prompt.tokens = tokens;
    prompt.count = 2;
    cache.begin(sequence, prompt);
    cache.allocate(sequence, 1);
    cache.commit(sequence, 1);
    cache.release(sequence);
  }
  CHECK(cache.num_cached() == 150'000);
  cache.clear();
  CHECK(cache.num_nodes() == 1 && cache.num_free() == 200'000);
}

void splits_merge_back() {
  CacheOptions options;
  options.num_blocks = 64;
  options.block_size = 4;
  PrefixCache cache(options);
  std::vector<Token> tokens(64);
  for (int round = 0; round < 3; ++round) {
    for (std::size_t length = 64; length > 1; length -= 3) {
      Sequence sequence;
      Prompt prompt;
      prompt.tokens = tokens.data();
      prompt.count = length;
      cache.begin(sequence, prompt);
      cache.allocate(sequence, length);
      cache.commit(sequence, length);
      cache.release(sequence);
      cache.check_invariants();
    }
  }
  Sequence whole;
  Prompt prompt;
  prompt.tokens = tokens.data();
  prompt.count = tokens.size();
  cache.begin(whole, prompt);
  cache.allocate(whole, 64);
  cache.commit(whole, 64);
  cache.release(whole);
  CHECK(cache.num_nodes() == 2);
}

// A file made by hand, its checksum right and anything in it wrong: refused, or a cache that is sound.
void a_forged_snapshot_does_no_harm() {
  CacheOptions options;
  options.num_blocks = 20;
  options.block_size = 3;
  options.sharing = Sharing::kAnonymous;
  options.k = 3;
  PrefixCache cache(options);
  std::mt19937 random(4);
  for (int i = 0; i < 30; ++i) {
    std::vector<Token> tokens(1 + random() % 12);
    for (Token& token : tokens) token = static_cast<Token>(random() % 2);
    Prompt prompt;
    prompt.tokens = tokens.data();
    prompt.count = tokens.size();
    prompt.tenant = i % 2 == 0 ? "a" : "b";
    Sequence sequence;
    cache.begin(sequence, prompt);
    cache.allocate(sequence, tokens.size());
    cache.commit(sequence, tokens.size());
    cache.release(sequence);
  }
  const std::string file = cache.save();
  const std::size_t header = 8 + 3 * 8;
  int loaded = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string forged = file;
    for (unsigned k = 1 + random() % 3; k > 0; --k) {
      forged[header + random() % (file.size() - header)] = static_cast<char>(random() % 3);
    }
    std::uint8_t sum[8];
    make_hasher("fold64", 0)->root(std::string_view(forged).substr(header), sum);
    std::memcpy(forged.data() + header - 8, sum, 8);
    PrefixCache other(options);
    try {
      other.load(forged);
      ++loaded;
    } catch (const std::invalid_argument&) {
      CHECK(other.num_cached() == 0);
    }
    other.check_invariants();
    other.clear();
    CHECK(other.num_free() == 20);
  }
  CHECK(loaded > 100);
}

}  // namespace

int main() {
  digests_are_the_published_ones();
  a_child_table_is_a_map();
  a_block_run_is_a_vector();
  equal_labels_are_told_apart_by_the_caller();
  ghosts_remember_the_last_ones();
  ghost_runs_remember_the_last_blocks();
  a_collision_is_a_miss();
  a_million_children_cost_no_more_than_two();
  splits_merge_back();
  a_forged_snapshot_does_no_harm();
  std::puts("the core's parts are sound");
  return 0;
}
