#include "kernels/thread_pool.hpp"

#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace caudex::kernels {
namespace {

// Long enough to bridge the serial code between two loops of a layer, short enough not to steal a core from others.
constexpr auto kSpinTime = std::chrono::microseconds(60);
constexpr int kSpinsPerClockRead = 64;
constexpr int kSpinsBeforeYield = 20000;

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  if (num_threads < 1 || num_threads > 1024) {
    throw std::invalid_argument("num_threads is " + std::to_string(num_threads) + "; expected 1 to 1024");
  }
  for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

bool ThreadPool::has_items() const {
  const std::uint64_t ticket = ticket_.load();
  return (ticket & 0xffffffffu) < (ticket >> 32);
}

bool ThreadPool::take_item(int thread) {
  std::uint64_t ticket = ticket_.load();
  do {
    if ((ticket & 0xffffffffu) >= (ticket >> 32)) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket + 1));
  // The loop cannot end before this item does, so its body stays in place.
  try {
    call_(context_, static_cast<int>(ticket & 0xffffffffu), thread);
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!thrown_) thrown_ = std::current_exception();
  }
  unfinished_.fetch_sub(1);
  return true;
}

void ThreadPool::run_shared(int count, Call call, void* context) {
  if (running_.exchange(true)) throw std::logic_error("a thread pool runs one loop at a time");
  call_ = call;
  context_ = context;
  unfinished_.store(count);
  ticket_.store(static_cast<std::uint64_t>(count) << 32);
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  while (take_item(0)) {
  }
  for (int spins = 0; unfinished_.load() != 0; ++spins) {
    if (spins > kSpinsBeforeYield) {
      std::this_thread::yield();
    } else {
      pause_briefly();
    }
  }
  const std::exception_ptr thrown = std::exchange(thrown_, nullptr);
  running_.store(false);
  if (thrown) std::rethrow_exception(thrown);
}

void ThreadPool::work(int thread) {
  auto last_work = std::chrono::steady_clock::now();
  for (int spins = 1; !stop_.load(); ++spins) {
    if (take_item(thread)) {
      while (take_item(thread)) {
      }
      last_work = std::chrono::steady_clock::now();
      continue;
    }
    pause_briefly();
    if (spins % kSpinsPerClockRead != 0 || std::chrono::steady_clock::now() - last_work < kSpinTime) continue;
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [this] { return stop_.load() || has_items(); });
    sleepers_.fetch_sub(1);
    last_work = std::chrono::steady_clock::now();
  }
}

}  // namespace caudex::kernels
