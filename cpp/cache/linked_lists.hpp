// Many doubly linked lists over one set of items.
#pragma once

#include <cstdint>
#include <vector>

namespace caudex {

// Items and lists are small integers; an item stands in at most one list. All operations are O(1), and the caller
// guarantees what they assume: items that are pushed stand in no list, others stand in the one that is named.
class LinkedLists {
 public:
  static constexpr std::uint32_t kNone = UINT32_MAX;

  std::uint32_t front(std::uint32_t list) const { return list < ends_.size() ? ends_[list].next : kNone; }
  std::uint32_t next(std::uint32_t item) const { return links_[item].next; }
  bool empty(std::uint32_t list) const { return front(list) == kNone; }

  void push_back(std::uint32_t list, std::uint32_t item) {
    grow(ends_, list);
    insert(list, ends_[list].previous, item);
  }

  void insert_after(std::uint32_t list, std::uint32_t previous, std::uint32_t item) { insert(list, previous, item); }

  void remove(std::uint32_t list, std::uint32_t item) {
    const Link link = links_[item];
    (link.previous == kNone ? ends_[list].next : links_[link.previous].next) = link.next;
    (link.next == kNone ? ends_[list].previous : links_[link.next].previous) = link.previous;
  }

  std::size_t bytes() const { return (links_.capacity() + ends_.capacity()) * sizeof(Link); }

 private:
  // Of a list: its last and its first item.
  struct Link {
    std::uint32_t previous = kNone;
    std::uint32_t next = kNone;
  };

  static void grow(std::vector<Link>& links, std::uint32_t index) {
    if (index >= links.size()) links.resize(index + 1 + index / 4);
  }

  void insert(std::uint32_t list, std::uint32_t previous, std::uint32_t item) {
    grow(links_, item);
    std::uint32_t& after = previous == kNone ? ends_[list].next : links_[previous].next;
    links_[item] = {previous, after};
    (after == kNone ? ends_[list].previous : links_[after].previous) = item;
    after = item;
  }

  std::vector<Link> links_;
  std::vector<Link> ends_;
};

}  // namespace caudex
