#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "cache/offline/block_trace.hpp"
#include "cache/offline/id_map.hpp"

namespace caudex::offline {

// Which request touched each block last, for a sequence of touched paths.
//
// Whoever touches a block touches all blocks before it, so the blocks last touched by one request are a suffix of its
// path: a *run*. A new path cuts the front off the runs that it meets, nearest the root first, and is then itself one
// run:
//
//   before:   [ run of request 7        |  rest of 7 ]          new path:  a b c d e f g
//              a    b    c                 x    y                          \7--/ \5/ new
//                            [ run of 5 | rest of 5 ]           after:     [ a b c d e f g ] of the new request,
//                              d    e     z                                x y still of 7, z still of 5
//
// So a path costs one comparison of ids (a memory stream) plus O(1) for each run that it meets, and no table is
// probed a block. Runs own their ids: memory is bounded by the distinct blocks (at most 16 bytes each, and about 80 a
// run).
//
// Ids whose parents disagree (the same id behind two different paths) are not an id's meaning; they give counts that
// mean nothing but do no harm.
class TouchRuns {
 public:
  using Handle = std::uint32_t;
  static constexpr Handle kNone = IdMap::kNone;

  struct Run {
    std::vector<ChainedId> ids;
    std::size_t head = 0;  // ids before it were touched again since, by others
    std::uint64_t owner = 0;

    std::size_t size() const { return ids.size() - head; }
    const ChainedId* begin() const { return ids.data() + head; }
  };

  // The run that begins with this block. Once a path's first n blocks are touched, its block n, if known, begins a
  // run.
  Handle find(ChainedId first) const { return starts_.find(first); }
  const Run& operator[](Handle run) const { return runs_[run]; }
  Run& operator[](Handle run) { return runs_[run]; }

  // Touches the first n blocks of a path on behalf of `owner`. Calls on_cut(handle, depth, length) for every run that
  // is met, before it loses its first `length` blocks, and on_drop(handle) for runs that disagree about parents.
  // Returns the handle of the new run, or kNone if n is 0.
  template <class OnCut, class OnDrop>
  Handle touch(const ChainedId* path, std::size_t n, std::uint64_t owner, OnCut&& on_cut, OnDrop&& on_drop) {
    if (n == 0) return kNone;
    for (std::size_t depth = 0; depth < n;) {
      const Handle met = find(path[depth]);
      if (met == kNone) break;
      const std::size_t length = common_prefix(path + depth, runs_[met].begin(), std::min(n - depth, runs_[met].size()));
      on_cut(met, depth, length);
      cut(met, length, on_drop);
      depth += length;
    }
    const Handle fresh = allocate();
    runs_[fresh].ids.assign(path, path + n);
    runs_[fresh].head = 0;
    runs_[fresh].owner = owner;
    begin_at(path[0], fresh, on_drop);
    return fresh;
  }

 private:
  static std::size_t common_prefix(const ChainedId* a, const ChainedId* b, std::size_t n) {
    std::size_t i = 0;
    for (; i + 8 <= n; i += 8) {
      std::uint64_t differ = 0;
      for (std::size_t j = i; j < i + 8; ++j) differ |= static_cast<std::uint64_t>(a[j] ^ b[j]);
      if (differ != 0) break;
    }
    while (i < n && a[i] == b[i]) ++i;
    return i;
  }

  template <class OnDrop>
  void cut(Handle handle, std::size_t length, OnDrop&& on_drop) {
    Run& run = runs_[handle];
    starts_.erase(*run.begin());
    run.head += length;
    if (run.size() == 0) return release(handle);
    if (run.head > run.size()) {  // keep no more than two ids for each that is still owned
      run.ids = std::vector<ChainedId>(run.begin(), run.begin() + run.size());
      run.head = 0;
    }
    begin_at(*run.begin(), handle, on_drop);
  }

  template <class OnDrop>
  void begin_at(ChainedId first, Handle handle, OnDrop&& on_drop) {
    const Handle stale = find(first);
    if (stale != kNone) {
      on_drop(stale);
      release(stale);
    }
    starts_.insert(first, handle);
  }

  Handle allocate() {
    if (spare_.empty()) {
      runs_.emplace_back();
      return static_cast<Handle>(runs_.size() - 1);
    }
    const Handle handle = spare_.back();
    spare_.pop_back();
    return handle;
  }

  void release(Handle handle) {
    runs_[handle] = Run();
    spare_.push_back(handle);
  }

  std::vector<Run> runs_;
  std::vector<Handle> spare_;
  IdMap starts_;
};

}  // namespace caudex::offline
