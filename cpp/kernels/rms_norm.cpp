#include "kernels/rms_norm.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace caudex::kernels {

RmsNorm::RmsNorm(const float* weight, int count, float epsilon, const KernelTable& kernels, ThreadPool& threads)
    : count_(count), epsilon_(epsilon), kernels_(kernels), threads_(threads), scratch_(threads.num_threads()) {
  if (count < 1) throw std::invalid_argument("a norm over " + std::to_string(count) + " elements");
  weight_.assign(weight, weight + count);
  weight_.resize(round_up(count, 16), 0.0f);
}

void RmsNorm::run(DType dtype, const char* input, int rows, char* output) {
  const std::size_t row_bytes = count_ * element_size(dtype);
  threads_.run((rows + kItemRows - 1) / kItemRows, [&](int item, int thread) {
    const int end = std::min(rows, (item + 1) * kItemRows);
    for (int row = item * kItemRows; row < end; ++row) {
      run_row(dtype, input + row * row_bytes, output + row * row_bytes, scratch_[thread]);
    }
  });
}

// By way of a padded copy: the kernel reads and writes whole vectors.
void RmsNorm::run_row(DType dtype, const char* input, char* output, AlignedBuffer& scratch) const {
  const std::size_t padded = weight_.size(), row_bytes = count_ * element_size(dtype);
  float* x = reinterpret_cast<float*>(scratch.reserve(2 * padded * sizeof(float)));
  char* normed = reinterpret_cast<char*>(x + padded);
  std::fill(x + count_, x + padded, 0.0f);
  if (dtype == DType::kFloat32) {
    std::memcpy(x, input, row_bytes);
    kernels_.rms_norm_f32(reinterpret_cast<float*>(normed), x, weight_.data(), count_, epsilon_);
  } else {
    kernels_.widen_bf16(x, reinterpret_cast<const bf16*>(input), count_);
    kernels_.rms_norm_bf16(reinterpret_cast<bf16*>(normed), x, weight_.data(), count_, epsilon_);
  }
  std::memcpy(output, normed, row_bytes);
}

}  // namespace caudex::kernels
