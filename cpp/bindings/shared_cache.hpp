// A cache that several Python threads may call.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "cache/prefix_cache.hpp"

namespace caudex {

// One cache, its lock, and what makes both safe under Python.
//
// A thread that has to wait for the lock gives up the GIL first, so the holder may take the GIL (to return, or to run
// a policy written in Python) without a deadlock.
class SharedCache {
 public:
  SharedCache(const CacheOptions& options, bool manual_clock) : manual_clock_(manual_clock), cache_(options) {}
  ~SharedCache() { release_orphans(); }

  template <typename Call>
  auto locked(Call call) {
    if (owner_.load() == std::this_thread::get_id()) {
      throw std::runtime_error("an eviction policy must not call the cache that is asking it");
    }
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) {
      nanobind::gil_scoped_release release;
      lock.lock();
    }
    Owner owner(owner_);
    if (!manual_clock_) cache_.set_time(wall_time());
    release_orphans();
    return call(cache_);
  }

  // The same without the GIL.
  template <typename Call>
  auto locked_without_gil(Call call) {
    return locked([&](PrefixCache& cache) {
      nanobind::gil_scoped_release release;
      return call(cache);
    });
  }

  // A Python object was dropped without release(). Never waits: it may be the garbage collector that calls.
  void abandon(std::unique_ptr<Sequence> sequence) {
    std::lock_guard<std::mutex> lock(orphans_mutex_);
    orphans_.push_back(std::move(sequence));
    has_orphans_ = true;
  }

 private:
  static double wall_time() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  struct Owner {
    explicit Owner(std::atomic<std::thread::id>& owner) : owner(owner) { owner = std::this_thread::get_id(); }
    ~Owner() { owner = std::thread::id(); }
    std::atomic<std::thread::id>& owner;
  };

  void release_orphans() {
    if (!has_orphans_) return;
    std::vector<std::unique_ptr<Sequence>> orphans;
    {
      std::lock_guard<std::mutex> lock(orphans_mutex_);
      orphans.swap(orphans_);
      has_orphans_ = false;
    }
    for (auto& sequence : orphans) {
      if (sequence->running) cache_.release(*sequence);
    }
  }

  bool manual_clock_;
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_{};
  std::mutex orphans_mutex_;
  std::vector<std::unique_ptr<Sequence>> orphans_;  // before the cache, which still knows them when it goes
  PrefixCache cache_;
  std::atomic<bool> has_orphans_{false};
};

}  // namespace caudex
