// Parallel loops: every item once, whatever the threads do meanwhile.
#include "kernels/thread_pool.hpp"

#include <memory>
#include <stdexcept>

#include "check.hpp"

using caudex::kernels::ThreadPool;

namespace {

constexpr int kMostThreads = 8;

void every_item_runs_once() {
  for (int threads = 1; threads <= kMostThreads; ++threads) {
    ThreadPool pool(threads);
    CHECK(pool.num_threads() == threads);
    for (int count = 0; count < 300; ++count) {
      std::vector<std::atomic<int>> runs(count), inside(threads);
      pool.run(count, [&](int item, int thread) {
        CHECK(thread >= 0 && thread < threads);
        CHECK(inside[thread].fetch_add(1) == 0);
        runs[item].fetch_add(1);
        inside[thread].fetch_sub(1);
      });
      for (const auto& times : runs) CHECK(times == 1);
    }
  }
}

// Workers asleep, workers still spinning, and a pool that ends before they have begun.
void a_loop_begins_whatever_the_workers_do() {
  for (int threads = 1; threads <= kMostThreads; ++threads) {
    for (int i = 0; i < 20; ++i) {
      ThreadPool pool(threads);
      std::atomic<int> sum{0};
      for (int pause = 0; pause <= 200; pause += 100) {
        std::this_thread::sleep_for(std::chrono::microseconds(pause));
        pool.run(5, [&](int item, int) { sum += item; });
      }
      CHECK(sum == 30);
    }
  }
}

void the_caller_gets_what_an_item_throws() {
  for (int threads = 1; threads <= kMostThreads; ++threads) {
    ThreadPool pool(threads);
    for (int thrower = 0; thrower < 40; ++thrower) {
      int caught = -1;
      try {
        pool.run(40, [&](int item, int) {
          if (item == thrower) throw item;
        });
      } catch (int item) {
        caught = item;
      }
      CHECK(caught == thrower);
      std::atomic<int> runs{0};
      pool.run(40, [&](int, int) { ++runs; });
      CHECK(runs == 40);
    }
  }
}

void one_thrown_of_many_is_enough() {
  ThreadPool pool(4);
  for (int i = 0; i < 100; ++i) {
    bool caught = false;
    try {
      pool.run(16, [](int item, int) { throw item; });
    } catch (int) {
      caught = true;
    }
    CHECK(caught);
  }
}

void a_loop_within_a_loop_is_refused() {
  for (int threads = 2; threads <= kMostThreads; ++threads) {
    ThreadPool pool(threads);
    bool refused = false;
    try {
      pool.run(8, [&](int, int) { pool.run(8, [](int, int) {}); });
    } catch (const std::logic_error&) {
      refused = true;
    }
    CHECK(refused);
    std::atomic<int> runs{0};
    pool.run(8, [&](int, int) { ++runs; });
    CHECK(runs == 8);
  }
}

void a_pool_of_its_own_works_within_a_loop() {
  for (int threads = 1; threads <= 4; ++threads) {
    ThreadPool outer(threads);
    std::vector<std::unique_ptr<ThreadPool>> inner;
    for (int thread = 0; thread < threads; ++thread) inner.push_back(std::make_unique<ThreadPool>(2));
    std::atomic<int> runs{0};
    outer.run(30, [&](int, int thread) { inner[thread]->run(30, [&](int, int) { ++runs; }); });
    CHECK(runs == 900);
  }
}

void a_senseless_size_is_refused() {
  for (const int threads : {-1, 0, 1025}) {
    bool refused = false;
    try {
      ThreadPool pool(threads);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

}  // namespace

int main() {
  every_item_runs_once();
  a_loop_begins_whatever_the_workers_do();
  the_caller_gets_what_an_item_throws();
  one_thrown_of_many_is_enough();
  a_loop_within_a_loop_is_refused();
  a_pool_of_its_own_works_within_a_loop();
  a_senseless_size_is_refused();
  std::puts("parallel loops run every item once");
  return 0;
}
