// What a decoder layer does to single rows. Included after elementwise.hpp.
#pragma once

namespace caudex::kernels {
namespace {

template <class T>
void rms_norm(T* target, const float* x, const float* weight, int count, float epsilon) {
  constexpr int kSumVectors = kSumLanes / kWidth;
  Vec sums[kSumVectors];
  for (int v = 0; v < kSumVectors; ++v) sums[v] = zeros();
  for (int i = 0; i < count; i += kSumLanes) {
    CAUDEX_UNROLL
    for (int v = 0; v < kSumVectors; ++v) {
      const Vec value = load(x + i + v * kWidth);
      sums[v] = multiply_add(value, value, sums[v]);
    }
  }
  float lanes[kSumLanes];
  for (int v = 0; v < kSumVectors; ++v) store(lanes + v * kWidth, sums[v]);
  const float mean = sum_lanes(lanes) / static_cast<float>(count);
  const Vec scale = splat(1.0f / __builtin_sqrtf(mean + epsilon));
  for (int i = 0; i < count; i += kWidth) store_as(target + i, mul(mul(load(x + i), scale), load(weight + i)));
}

// Scalar code may be vectorised as the compiler likes: without contraction every element rounds alike.
void rotate(float* x, const float* cos, const float* sin, int count) {
  const int half = count / 2;
  float* y = x + half;
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = y[i];
    x[i] = a * cos[i] - b * sin[i];
    y[i] = b * cos[i] + a * sin[i];
  }
}

void round_to_bf16(bf16* target, const float* source, int count) {
  int i = 0;
  for (; i + kWidth <= count; i += kWidth) store_bf16(target + i, load(source + i));
  if (i == count) return;
  float rest[kWidth] = {};
  __builtin_memcpy(rest, source + i, (count - i) * sizeof(float));
  store_first(target + i, load(rest), count - i);
}

}  // namespace
}  // namespace caudex::kernels
