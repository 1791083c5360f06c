#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "routing/prefix_tree.hpp"

// Layout, little-endian as the machine is: u32 magic, then for each node in pre-order
//   u32 edge length, the keys, u32 holders, {u32 worker, u32 length, f64 last use} each, u32 children.
namespace caudex::routing {
namespace {

constexpr std::uint32_t kMagic = 0x31545043;  // "CPT1"
constexpr int kMaxDepth = 10'000;

template <typename T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  template <typename T>
  T get() {
    if (bytes_.size() - at_ < sizeof(T)) throw std::invalid_argument("prefix tree snapshot is truncated");
    T value;
    std::memcpy(&value, bytes_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }

  std::uint32_t get_count(std::size_t item_bytes) {
    const auto count = get<std::uint32_t>();
    if (count > (bytes_.size() - at_) / item_bytes) throw std::invalid_argument("prefix tree snapshot is truncated");
    return count;
  }

  bool at_end() const { return at_ == bytes_.size(); }

 private:
  const std::string& bytes_;
  std::size_t at_ = 0;
};

/// One worker's claim on a whole path, replayed through insert() in order of last use.
struct Claim {
  double last_use;
  std::uint32_t worker;
  std::vector<Key> keys;
};

void read_node(Reader& reader, std::vector<Key>& path, std::vector<Claim>& claims, int depth) {
  if (depth > kMaxDepth) throw std::invalid_argument("prefix tree snapshot is nested too deeply");
  const std::size_t path_length = path.size();
  const std::uint32_t edge_length = reader.get_count(sizeof(Key));
  for (std::uint32_t i = 0; i < edge_length; ++i) path.push_back(reader.get<Key>());
  for (std::uint32_t i = reader.get_count(16); i > 0; --i) {
    const auto worker = reader.get<std::uint32_t>();
    const auto length = reader.get<std::uint32_t>();
    const auto last_use = reader.get<double>();
    if (length == 0 || length > edge_length || worker > 1'000'000 || !std::isfinite(last_use)) {
      throw std::invalid_argument("prefix tree snapshot is corrupt");
    }
    claims.push_back({last_use, worker, {path.begin(), path.begin() + path_length + length}});
  }
  for (std::uint32_t i = reader.get_count(12); i > 0; --i) read_node(reader, path, claims, depth + 1);
  path.resize(path_length);
}

}  // namespace

void PrefixTree::dump_node(NodeId id, std::string& out) const {
  const Node& node = nodes_[id];
  put(out, static_cast<std::uint32_t>(node.edge.size()));
  out.append(reinterpret_cast<const char*>(node.edge.data()), node.edge.size() * sizeof(Key));
  put(out, static_cast<std::uint32_t>(node.holders.size()));
  for (const Holder& holder : node.holders) {
    put(out, holder.worker);
    put(out, holder.length);
    put(out, entries_[holder.entry].last_use);
  }
  std::vector<NodeId> children;
  for (NodeId child = node.first_child; child != kNone; child = nodes_[child].next_sibling) children.push_back(child);
  put(out, static_cast<std::uint32_t>(children.size()));
  for (const NodeId child : children) dump_node(child, out);
}

std::string PrefixTree::dump() const {
  std::string out;
  put(out, kMagic);
  dump_node(kRoot, out);
  return out;
}

void PrefixTree::load(const std::string& bytes) {
  Reader reader(bytes);
  if (reader.get<std::uint32_t>() != kMagic) throw std::invalid_argument("not a prefix tree snapshot");
  std::vector<Key> path;
  std::vector<Claim> claims;
  read_node(reader, path, claims, 0);
  if (!reader.at_end()) throw std::invalid_argument("prefix tree snapshot has trailing bytes");
  std::stable_sort(claims.begin(), claims.end(), [](const Claim& a, const Claim& b) {
    return a.last_use < b.last_use || (a.last_use == b.last_use && a.keys.size() > b.keys.size());
  });
  PrefixTree loaded(default_capacity_);
  for (Worker worker = 0; worker < workers_.size(); ++worker) loaded.state(worker).capacity = workers_[worker].capacity;
  for (const Claim& claim : claims) {
    loaded.insert(claim.worker, claim.keys.data(), claim.keys.size(), claim.last_use);
  }
  *this = std::move(loaded);
}

}  // namespace caudex::routing
