#pragma once

#include <vector>

#include "kernels/aligned_buffer.hpp"
#include "kernels/kernel_table.hpp"
#include "kernels/thread_pool.hpp"

namespace caudex::kernels {

// weight * x / sqrt(mean(x^2) + epsilon) of rows in either type, computed in float32 and rounded once. A row's bits
// depend on that row alone.
class RmsNorm {
 public:
  // `weight`: [count]. Throws std::invalid_argument if `count` is below 1.
  RmsNorm(const float* weight, int count, float epsilon, const KernelTable& kernels, ThreadPool& threads);
  RmsNorm(const RmsNorm&) = delete;
  RmsNorm& operator=(const RmsNorm&) = delete;

  // [rows][count] to [rows][count], contiguous.
  void run(DType dtype, const char* input, int rows, char* output);

 private:
  static constexpr int kItemRows = 16;

  void run_row(DType dtype, const char* input, char* output, AlignedBuffer& scratch) const;

  const int count_;
  const float epsilon_;
  const KernelTable& kernels_;
  ThreadPool& threads_;
  std::vector<float> weight_;           // padded to 16
  std::vector<AlignedBuffer> scratch_;  // a thread's
};

}  // namespace caudex::kernels
