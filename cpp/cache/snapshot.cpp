// Saving the index, and loading it into an empty cache.
//
//     "CDXCACHE" | version | payload bytes | checksum of the payload | payload
//
// All numbers are 64 bits, little-endian; tokens and block ids 32. The payload holds the shape of the cache, its contents
// and namespaces, and every node of the tree with its tokens and blocks, those that were unpinned longest ago first: the
// nodes are loaded in that order, each as if a request had just ended there, so that an LRU order is the same afterwards.
// KV, what is private to running requests, and counters are not in it.
#include <algorithm>
#include <cstring>

#include "cache/prefix_cache.hpp"

namespace caudex {
namespace {

constexpr char kMagic[] = "CDXCACHE";
constexpr std::uint64_t kVersion = 1;

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument("this snapshot cannot be loaded: " + why); }

std::uint64_t checksum(std::string_view payload) {
  std::uint8_t key[8];
  make_hasher("fold64", 0)->root(payload, key);
  std::uint64_t sum;
  std::memcpy(&sum, key, sizeof sum);
  return sum;
}

class Writer {
 public:
  void number(std::uint64_t value, int bytes = 8) {
    for (int i = 0; i < bytes; ++i) bytes_.push_back(static_cast<char>(value >> (8 * i)));
  }
  void text(std::string_view value) {
    number(value.size());
    bytes_.append(value);
  }
  void integers(const std::vector<std::int32_t>& values) {
    number(values.size());
    for (std::int32_t value : values) number(static_cast<std::uint32_t>(value), 4);
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  std::uint64_t number(int bytes = 8) {
    const std::string_view raw = take(static_cast<std::size_t>(bytes));
    std::uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) value |= std::uint64_t{static_cast<std::uint8_t>(raw[i])} << (8 * i);
    return value;
  }
  std::uint64_t number_below(std::uint64_t limit) {
    const std::uint64_t value = number();
    if (value >= limit) refuse("a number in it is out of range");
    return value;
  }
  std::string text() { return std::string(take(number())); }
  std::vector<std::int32_t> integers() {
    std::vector<std::int32_t> values(number_below(bytes_.size() / 4 + 1));
    for (std::int32_t& value : values) value = static_cast<std::int32_t>(number(4));
    return values;
  }
  std::string_view take(std::size_t count) {
    if (count > bytes_.size()) refuse("it ends early");
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }
  bool is_done() const { return bytes_.empty(); }

 private:
  std::string_view bytes_;
};

}  // namespace

// One node, with the path that leads to it spelled out when it is loaded.
struct PrefixCache::SavedNode {
  std::uint64_t space = 0;
  std::uint64_t parent = 0;  // its place in the file plus one, or 0 below the namespace's root
  Position start = 0;
  std::vector<Token> tokens;
  std::vector<BlockId> blocks;
  std::vector<std::int32_t> audience;  // places in the list of tenants; empty for everyone
};

struct PrefixCache::SavedSpace {
  std::string name;
  std::string tree_name;
  std::vector<std::vector<Token>> registered;
};

struct PrefixCache::Saved {
  std::vector<std::string> tenants;
  std::vector<std::pair<std::uint64_t, std::string>> contents;
  std::vector<SavedSpace> spaces;
  std::vector<SavedNode> nodes;
};

// ---------------------------------------------------------------------------------------------------------- saving

std::string PrefixCache::save() const {
  Writer out;
  out.number(block_size());
  out.number(num_blocks());
  out.number(static_cast<std::uint64_t>(options_.grain));
  out.number(static_cast<std::uint64_t>(options_.sharing));
  out.number(options_.k);

  Places<Tenant> tenants;  // their places in the file
  out.number(tenants_.size());
  for (const auto& [name, id] : tenants_) {
    tenants.emplace(id, tenants.size());
    out.text(name);
  }
  const auto& contents = content_.keys();
  out.number(contents.size());
  for (const auto& [code, key] : contents) {
    out.number(code);
    out.text(key);
  }
  Places<SpaceId> spaces;
  out.number(space_ids_.size());
  for (SpaceId id = 0; id < spaces_.size(); ++id) {
    const Space& space = spaces_[id];
    if (!space.is_open()) continue;
    spaces.emplace(id, spaces.size());
    out.text(space.name);
    out.text(space.tree_name);
    out.number(space.registered.size());
    for (const std::vector<Token>& prefix : space.registered) out.integers(prefix);
  }
  save_nodes(out, spaces, tenants);

  const std::string payload = out.take();
  Writer file;
  file.number(kVersion);
  file.number(payload.size());
  file.number(checksum(payload));
  return kMagic + file.take() + payload;
}

template <typename Out>
void PrefixCache::save_nodes(Out& out, const Places<SpaceId>& spaces, const Places<Tenant>& tenants) const {
  std::vector<NodeId> order;
  for (const auto& [id, place] : spaces) tree_.append_nodes(spaces_[id].root, order);
  // Pinned nodes count as used right now. In either group a node comes after its descendants.
  std::sort(order.begin(), order.end(), [&](NodeId a, NodeId b) {
    const Node& x = tree_.nodes()[a];
    const Node& y = tree_.nodes()[b];
    if (x.is_pinned() != y.is_pinned()) return y.is_pinned();
    if (!x.is_pinned() && x.unpinned != y.unpinned) return x.unpinned < y.unpinned;
    return x.end > y.end;
  });
  std::unordered_map<NodeId, std::uint64_t> places;
  for (std::size_t i = 0; i < order.size(); ++i) places[order[i]] = i + 1;
  out.number(order.size());
  for (NodeId id : order) {
    const Node& node = tree_.nodes()[id];
    std::vector<Token> tokens(node.end - node.start);
    tree_.copy_tokens(id, tokens.data());
    std::vector<BlockId> blocks(node.blocks.begin(), node.blocks.end());
    // A tail that a running request keeps beside longer copies of it stays behind.
    if (!node.is_leaf() && tree_.ends_inside_block(node) && tree_.has_tail(node)) blocks.pop_back();
    std::vector<std::int32_t> audience;
    for (Tenant tenant : audiences_.members(node.audience)) {
      audience.push_back(static_cast<std::int32_t>(tenants.at(tenant)));
    }
    out.number(spaces.at(node.space));
    out.number(tree_.nodes()[node.parent].is_root() ? 0 : places[node.parent]);
    out.integers(tokens);
    out.integers(blocks);
    out.integers(audience);
  }
}

// --------------------------------------------------------------------------------------------------------- loading

void PrefixCache::load(std::string_view file) {
  if (running_ != nullptr || tree_.num_resident() > 0) throw std::invalid_argument("a snapshot is loaded into an empty cache");
  Reader header(file);
  if (file.size() < sizeof kMagic - 1 || header.take(sizeof kMagic - 1) != kMagic) refuse("it is none");
  const std::uint64_t version = header.number();
  if (version != kVersion) refuse("it is of version " + std::to_string(version));
  const std::uint64_t size = header.number();
  const std::uint64_t sum = header.number();
  const std::string_view payload = header.take(size);
  if (!header.is_done()) refuse("something follows its end");
  if (checksum(payload) != sum) refuse("its checksum is wrong");
  const Saved saved = parse(payload);
  require_consistent(saved);
  adopt_saved(saved);
}

PrefixCache::Saved PrefixCache::parse(std::string_view payload) const {
  Reader in(payload);
  const auto require = [](std::uint64_t saved, std::uint64_t ours, const char* what) {
    if (saved != ours) refuse(std::string("its ") + what + " is " + std::to_string(saved) + ", not " + std::to_string(ours));
  };
  require(in.number(), block_size(), "block size");
  const std::uint64_t num_saved_blocks = in.number();
  if (num_saved_blocks > num_blocks()) refuse("it needs " + std::to_string(num_saved_blocks) + " blocks");
  require(in.number(), static_cast<std::uint64_t>(options_.grain), "index");
  require(in.number(), static_cast<std::uint64_t>(options_.sharing), "sharing policy");
  require(in.number(), options_.k, "k");

  Saved saved;
  const std::size_t most = payload.size();  // no list can have more entries than the file has bytes
  saved.tenants.resize(in.number_below(most));
  for (std::string& name : saved.tenants) name = in.text();
  saved.contents.resize(in.number_below(most));
  for (auto& [code, key] : saved.contents) {
    code = in.number_below(ContentBook::kNumCodes);
    key = in.text();
  }
  saved.spaces.resize(in.number_below(most));
  for (SavedSpace& space : saved.spaces) {
    space.name = in.text();
    space.tree_name = in.text();
    space.registered.resize(in.number_below(most));
    for (std::vector<Token>& prefix : space.registered) prefix = in.integers();
  }
  saved.nodes.resize(in.number_below(most));
  for (SavedNode& node : saved.nodes) {
    node.space = in.number_below(saved.spaces.size());
    node.parent = in.number_below(saved.nodes.size() + 1);
    node.tokens = in.integers();
    node.blocks = in.integers();
    node.audience = in.integers();
  }
  if (!in.is_done()) refuse("its payload goes on too long");
  // Children come before their parents, so starts are known from the back.
  for (std::size_t i = saved.nodes.size(); i-- > 0;) {
    SavedNode& node = saved.nodes[i];
    if (node.parent == 0) continue;
    if (node.parent - 1 <= i) refuse("its nodes are out of order");
    const SavedNode& parent = saved.nodes[node.parent - 1];
    if (parent.space != node.space) refuse("its namespaces are mixed up");
    node.start = parent.start + static_cast<Position>(parent.tokens.size());
  }
  return saved;
}

// The file's checksum guards against accidents; this guards the cache against a file made by hand.
void PrefixCache::require_consistent(const Saved& saved) const {
  std::vector<std::uint8_t> used(num_blocks(), 0);
  std::vector<std::uint8_t> has_child(saved.nodes.size() + 1, 0);
  for (const SavedNode& node : saved.nodes) has_child[node.parent] = 1;
  for (std::size_t i = 0; i < saved.nodes.size(); ++i) {
    const SavedNode& node = saved.nodes[i];
    const std::size_t end = node.start + node.tokens.size();
    const bool has_tail = end % block_size() != 0 && !has_child[i + 1];
    if (node.tokens.empty() || end > kMaxTokens) refuse("a node in it is empty or too long");
    if (node.blocks.size() != end / block_size() - node.start / block_size() + has_tail) refuse("a node lacks blocks");
    if (options_.grain == Grain::kBlock && end % block_size() != 0) refuse("a node ends inside a block");
    for (BlockId block : node.blocks) {
      if (block < 0 || static_cast<std::uint32_t>(block) >= num_blocks() || used[block]) refuse("a block is taken twice");
      used[block] = 1;
    }
    for (std::int32_t tenant : node.audience) {
      if (tenant < 0 || static_cast<std::size_t>(tenant) >= saved.tenants.size()) refuse("a tenant in it is unknown");
    }
  }
}

void PrefixCache::adopt_saved(const Saved& saved) {
  std::vector<Tenant> tenants;
  for (const std::string& name : saved.tenants) tenants.push_back(add_tenant(name));
  for (const auto& [code, key] : saved.contents) content_.insert(static_cast<std::uint32_t>(code), key);
  std::vector<SpaceId> spaces;
  for (const SavedSpace& space : saved.spaces) {
    spaces.push_back(open_tree(space.name, space.tree_name));
    spaces_[spaces.back()].registered = space.registered;
  }
  std::vector<std::uint8_t> used(num_blocks(), 0);
  for (const SavedNode& node : saved.nodes) {
    for (BlockId block : node.blocks) used[block] = 1;
  }
  pool_.resize(num_blocks(), used);
  for (const SavedNode& node : saved.nodes) adopt_node(saved, node, spaces[node.space], tenants);
  if (tree_.num_resident() == static_cast<std::uint64_t>(std::count(used.begin(), used.end(), 1))) return;
  clear();
  pool_.resize(num_blocks(), std::vector<std::uint8_t>(num_blocks(), 0));
  refuse("some of its nodes are equal");
}

// Brings the path to a node into the tree, as far as it is not there, and ends a request at it.
void PrefixCache::adopt_node(const Saved& saved, const SavedNode& node, SpaceId space,
                             const std::vector<Tenant>& tenants) {
  const Position end = node.start + static_cast<Position>(node.tokens.size());
  Sequence path;
  path.space = space;
  path.tokens.resize(end);
  path.table.resize(blocks_for(end), kNoBlock);
  for (const SavedNode* at = &node;; at = &saved.nodes[at->parent - 1]) {
    std::copy(at->tokens.begin(), at->tokens.end(), path.tokens.begin() + at->start);
    // The deeper node's copy of a block that two of them share is the one that goes on.
    for (std::size_t i = 0; i < at->blocks.size(); ++i) {
      BlockId& place = path.table[at->start / block_size() + i];
      if (place == kNoBlock) place = at->blocks[i];
    }
    if (at->parent == 0) break;
  }
  const Walk walk = tree_.walk(spaces_[space].root, path.tokens.data(), end, kOperator);
  NodeId leaf = tree_.node_ending_at(walk.node, walk.end);
  if (walk.end < end) {
    const std::uint32_t first = walk.end / block_size();
    write_tokens(path, walk.end, end);
    leaf = tree_.add_leaf(leaf, end, path.table.data() + first, blocks_for(end) - first, kEveryone);
  }
  AudienceId audience = kEveryone;
  for (std::size_t i = 0; i < node.audience.size(); ++i) {
    const Tenant tenant = tenants[node.audience[i]];
    const AudienceId wider = i == 0 ? audiences_.only(tenant) : audiences_.join(audience, tenant);
    audiences_.drop(audience);
    audience = wider;
  }
  tree_.set_audience(leaf, audience);
  tree_.anchor(leaf);
  Request request;
  request.serial = ++num_begun_;
  request.begin_time = request.end_time = now_;
  request.space = space;
  request.leaf = leaf;
  request.num_prompt_tokens = request.num_tokens = end;
  tree_.policy().end_request(request);
  tree_.release(leaf);
}

}  // namespace caudex
