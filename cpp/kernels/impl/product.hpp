// The register tile that every product here is made of. Included after one vector header of kernels/simd.
#pragma once

#define CAUDEX_UNROLL _Pragma("GCC unroll 16")

namespace caudex::kernels {
namespace {

struct F32Product {
  using Sum = Vec;
  struct Right {
    Vec values;
  };
  struct Left {
    Vec value;
  };
  static constexpr int kDepth = 1;
  static constexpr int kLeftStep = 4;
  static constexpr int kWeightDegree = 6;
  static Right right(const char* p) { return {load(reinterpret_cast<const float*>(p))}; }
  static Left left(const char* p) { return {splat(*reinterpret_cast<const float*>(p))}; }
  static Vec accumulate(Vec sum, Left a, Right b) { return multiply_add(a.value, b.values, sum); }
  static void store_left(char* p, int index, Vec v) { store(reinterpret_cast<float*>(p) + index, v); }
};

// Asks for no memory ahead of its use.
struct NoPrefetch {
  static NoPrefetch after(int) { return {}; }
  static void at_step(int) {}
};

// sums[r][v] += left[r] . right[v], step by step: each output has one accumulator and takes its steps in ascending
// order, so its bits do not depend on how many rows or columns are computed beside it.
template <class Product, int R, int V, class Prefetch = NoPrefetch>
inline __attribute__((always_inline)) void multiply_tile(typename Product::Sum (&sums)[R][V], const char* left, std::size_t left_row,
                                                         const char* const (&right)[V], std::size_t right_step,
                                                         int steps, Prefetch prefetch = {}) {
  for (int s = 0; s < steps; ++s) {
    prefetch.at_step(s);
    typename Product::Right columns[V];
    CAUDEX_UNROLL
    for (int v = 0; v < V; ++v) columns[v] = Product::right(right[v] + s * right_step);
    CAUDEX_UNROLL
    for (int r = 0; r < R; ++r) {
      const typename Product::Left row = Product::left(left + r * left_row + s * Product::kLeftStep);
      CAUDEX_UNROLL
      for (int v = 0; v < V; ++v) sums[r][v] = Product::accumulate(sums[r][v], row, columns[v]);
    }
  }
}

}  // namespace
}  // namespace caudex::kernels
