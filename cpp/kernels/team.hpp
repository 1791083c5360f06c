#pragma once

#include "kernels/thread_pool.hpp"

namespace caudex::kernels {

// Who shares out the items of a loop: all threads of a pool, or one of them alone, from inside an item of the pool's own
// loop. What is written in terms of a team runs either way, and gives the same bits.
class Team {
 public:
  static Team all(ThreadPool& pool) { return Team(&pool, 0); }
  static Team alone(int thread) { return Team(nullptr, thread); }

  int num_threads() const { return pool_ ? pool_->num_threads() : 1; }

  // The thread that is in no other team: room kept by its number is the team's own.
  int leader() const { return leader_; }

  // Call `body(item, thread)` once for every item in [0, count).
  template <class Body>
  void run(int count, const Body& body) const {
    if (pool_) return pool_->run(count, body);
    for (int item = 0; item < count; ++item) body(item, leader_);
  }

 private:
  Team(ThreadPool* pool, int leader) : pool_(pool), leader_(leader) {}

  ThreadPool* pool_;  // null: the leader alone
  int leader_;
};

}  // namespace caudex::kernels
