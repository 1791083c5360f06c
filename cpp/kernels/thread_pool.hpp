#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace caudex::kernels {

// Threads that share out the items of one parallel loop at a time. The caller takes part; a worker that comes late, or
// not at all because its core is busy, costs nothing, since `run` waits only for items that a worker has begun.
// Workers spin for a bounded time after a loop (so that the next loop of the same forward pass starts in under a
// microsecond), then sleep. `run` must not be called from two threads at once, nor from inside an item.
class ThreadPool {
 public:
  // `num_threads` counts the caller: 1 makes no thread at all. Throws std::invalid_argument below 1 or above 1024.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Call `body(item, thread)` once for every item in [0, count), `thread` in [0, num_threads()). If items throw, one of
  // the exceptions is thrown here when no item runs any more; with one thread the items after it do not run. Throws
  // std::logic_error when the threads are in another loop already.
  template <class Body>
  void run(int count, const Body& body) {
    if (workers_.empty() || count <= 1) {
      for (int item = 0; item < count; ++item) body(item, 0);
      return;
    }
    const Body* address = &body;
    run_shared(
        count,
        [](void* context, int item, int thread) { (**static_cast<const Body**>(context))(item, thread); }, &address);
  }

 private:
  using Call = void (*)(void* context, int item, int thread);

  void run_shared(int count, Call call, void* context);
  bool take_item(int thread);
  void work(int thread);
  bool has_items() const;

  // The next item in the low half, the item count in the high half: one word, so that an item is claimed for the loop
  // it belongs to even by a worker that slept through the loops before.
  std::atomic<std::uint64_t> ticket_{0};
  std::atomic<int> unfinished_{0};
  std::atomic<bool> stop_{false}, running_{false};
  Call call_ = nullptr;
  void* context_ = nullptr;

  std::exception_ptr thrown_;  // of this loop's items, the first; guarded by `mutex_` while they run

  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  std::vector<std::thread> workers_;
};

}  // namespace caudex::kernels
