#include "cache/parity/sglang_cache.hpp"

#include <algorithm>
#include <string>

namespace caudex::parity {

struct SglangNode {
  SglangNode* parent = nullptr;
  std::vector<Token> key;
  std::unordered_map<std::string, std::unique_ptr<SglangNode>> children;  // by the bytes of their first page
  std::uint32_t locks = 0;
  std::uint64_t last_access = 0;
};

namespace {

std::string page_key(const Token* tokens, std::size_t page_size) {
  return std::string(reinterpret_cast<const char*>(tokens), page_size * sizeof(Token));
}

}  // namespace

bool SglangCache::Older::operator()(const SglangNode* a, const SglangNode* b) const {
  return a->last_access != b->last_access ? a->last_access < b->last_access : a < b;
}

SglangCache::SglangCache(std::uint32_t num_pages, std::uint32_t page_size)
    : page_size_(page_size),
      root_(std::make_unique<SglangNode>()),
      num_slots_(std::size_t{num_pages} * page_size),
      free_(num_slots_) {}

SglangCache::~SglangCache() = default;

// ------------------------------------------------------------------------------------------------------- requests

std::size_t SglangCache::begin(SglangRequest& request, const Token* tokens, std::size_t count) {
  if (count == 0) throw std::invalid_argument("a request needs at least one token, got none");
  request = SglangRequest{};
  request.tokens.assign(tokens, tokens + count);
  request.running = true;
  request.node = match(tokens, floor(count - 1), request.num_cached);
  lock(request.node);
  request.in_tree = request.allocated = request.num_cached;
  return request.num_cached;
}

void SglangCache::allocate(SglangRequest& request, std::size_t num_tokens) {
  const std::size_t wanted = floor(num_tokens + page_size_ - 1);
  if (wanted <= request.allocated) return;
  const std::size_t need = wanted - request.allocated;
  if (need > free_ + evictable_) {
    throw OutOfBlocks("need " + std::to_string(need) + " more slots, but only " + std::to_string(free_) +
                      " are free and " + std::to_string(evictable_) + " evictable");
  }
  if (need > free_) evict(need - free_);
  free_ -= need;
  request.allocated = wanted;
}

void SglangCache::append(SglangRequest& request, const Token* tokens, std::size_t count) {
  request.tokens.insert(request.tokens.end(), tokens, tokens + count);
}

void SglangCache::commit(SglangRequest& request, std::size_t num_tokens) {
  const std::size_t count = floor(std::min(num_tokens, request.allocated));
  if (count <= request.in_tree) return;
  const std::size_t known = insert(request.tokens.data(), count);
  free_ += std::max(known, request.in_tree) - request.in_tree;  // duplicates
  request.in_tree = count;
  std::size_t matched = 0;
  SglangNode* node = match(request.tokens.data(), count, matched);
  lock(node);
  unlock(request.node);
  request.node = node;
}

void SglangCache::release(SglangRequest& request) {
  free_ += request.allocated - request.in_tree;
  unlock(request.node);
  request = SglangRequest{};
}

bool SglangCache::reset() {
  if (free_ + evictable_ < num_slots_) return false;
  leaves_.clear();
  root_->children.clear();
  free_ = num_slots_;
  evictable_ = 0;
  return true;
}

std::vector<SglangCache::Leaf> SglangCache::eviction_order() const {
  std::vector<Leaf> order;
  order.reserve(leaves_.size());
  for (const SglangNode* leaf : leaves_) order.push_back(describe(leaf));
  return order;
}

SglangCache::Leaf SglangCache::describe(const SglangNode* leaf) const {
  std::vector<Token> reversed;
  for (const SglangNode* node = leaf; node != root_.get(); node = node->parent) {
    reversed.insert(reversed.end(), node->key.rbegin(), node->key.rend());
  }
  return {std::vector<Token>(reversed.rbegin(), reversed.rend()), leaf->key.size()};
}

// ----------------------------------------------------------------------------------------------------------- tree

SglangNode* SglangCache::match(const Token* tokens, std::size_t count, std::size_t& matched) {
  const std::uint64_t time = ++clock_;
  SglangNode* node = root_.get();
  matched = 0;
  while (matched < count) {
    auto found = node->children.find(page_key(tokens + matched, page_size_));
    if (found == node->children.end()) break;
    SglangNode* child = found->second.get();
    touch(child, time);
    const std::size_t limit = std::min(child->key.size(), count - matched);
    const auto mismatch = std::mismatch(child->key.begin(), child->key.begin() + limit, tokens + matched);
    const std::size_t common = floor(mismatch.first - child->key.begin());
    matched += common;
    if (common < child->key.size()) return split(child, common);
    node = child;
  }
  return node;
}

std::size_t SglangCache::insert(const Token* tokens, std::size_t count) {
  std::size_t known = 0;
  SglangNode* node = match(tokens, count, known);
  if (known == count) return known;
  auto leaf = std::make_unique<SglangNode>();
  leaf->parent = node;
  leaf->key.assign(tokens + known, tokens + count);
  leaf->last_access = ++clock_;
  SglangNode* added = leaf.get();
  node->children.emplace(page_key(tokens + known, page_size_), std::move(leaf));
  evictable_ += count - known;
  update_leaf(node);
  update_leaf(added);
  return known;
}

// The first `length` tokens of a node become a new one above it.
SglangNode* SglangCache::split(SglangNode* node, std::size_t length) {
  SglangNode* parent = node->parent;
  std::unique_ptr<SglangNode>& place = parent->children[page_key(node->key.data(), page_size_)];
  auto upper = std::make_unique<SglangNode>();
  upper->parent = parent;
  upper->key.assign(node->key.begin(), node->key.begin() + length);
  upper->locks = node->locks;
  upper->last_access = ++clock_;
  node->key.erase(node->key.begin(), node->key.begin() + length);
  node->parent = upper.get();
  upper->children.emplace(page_key(node->key.data(), page_size_), std::move(place));
  place = std::move(upper);
  return place.get();
}

void SglangCache::touch(SglangNode* node, std::uint64_t time) {
  const bool is_candidate = leaves_.erase(node) > 0;
  node->last_access = time;
  if (is_candidate) leaves_.insert(node);
}

void SglangCache::lock(SglangNode* node) {
  for (; node != root_.get(); node = node->parent) {
    if (node->locks++ == 0) evictable_ -= node->key.size();
    update_leaf(node);
  }
}

void SglangCache::unlock(SglangNode* node) {
  for (; node != root_.get(); node = node->parent) {
    if (--node->locks == 0) evictable_ += node->key.size();
    update_leaf(node);
  }
}

void SglangCache::update_leaf(SglangNode* node) {
  if (node->locks == 0 && node->children.empty() && node != root_.get()) leaves_.insert(node);
  else leaves_.erase(node);
}

void SglangCache::evict(std::size_t num_tokens) {
  std::size_t evicted = 0;
  while (evicted < num_tokens && !leaves_.empty()) {
    SglangNode* leaf = *leaves_.begin();
    SglangNode* parent = leaf->parent;
    evicted += leaf->key.size();
    evictable_ -= leaf->key.size();
    leaves_.erase(leaf);
    parent->children.erase(page_key(leaf->key.data(), page_size_));
    update_leaf(parent);
  }
  free_ += evicted;
  num_evicted_ += evicted;
}

}  // namespace caudex::parity
