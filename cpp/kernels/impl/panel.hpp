// Left operands times one packed panel, and what becomes of the sums. Included after product.hpp and elementwise.hpp.
#pragma once

namespace caudex::kernels {
namespace {

template <class Product, int R>
inline void multiply_rows(const PanelProduct& product, int first) {
  for (int column = 0; column < kPanelColumns; column += kProductVectors * kWidth) {
    const char* columns[kProductVectors];
    Vec sums[R][kProductVectors];
    CAUDEX_UNROLL
    for (int v = 0; v < kProductVectors; ++v) {
      columns[v] = product.panel + (column + v * kWidth) * 4;
      CAUDEX_UNROLL
      for (int r = 0; r < R; ++r) sums[r][v] = zeros();
    }
    multiply_tile<Product, R, kProductVectors>(sums, product.left + first * product.left_row, product.left_row, columns,
                                               kPanelColumns * 4, product.steps);
    float* target = product.sums + first * kPanelColumns + column;
    CAUDEX_UNROLL
    for (int r = 0; r < R; ++r) {
      CAUDEX_UNROLL
      for (int v = 0; v < kProductVectors; ++v) store(target + r * kPanelColumns + v * kWidth, sums[r][v]);
    }
  }
}

// `rows` <= R rows, by the instance compiled for that number.
template <class Product, int R>
inline void multiply_some_rows(const PanelProduct& product, int first, int rows) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_some_rows<Product, R - 1>(product, first, rows);
  }
  multiply_rows<Product, R>(product, first);
}

inline void prefetch_range(const char* begin, const char* end) {
  for (; begin < end; begin += 64) __builtin_prefetch(begin, 0, 2);
}

// Passes of nearly equal height, so that 13 rows cost 7 + 6 and not 12 + 1.
template <class Product>
void multiply_panel(const PanelProduct& product) {
  const int passes = (product.rows + kProductRows - 1) / kProductRows;
  for (int pass = 0; pass < passes; ++pass) {
    const int first = product.rows * pass / passes;
    const int end = product.rows * (pass + 1) / passes;
    prefetch_range(product.prefetch + product.prefetch_bytes * pass / passes,
                   product.prefetch + product.prefetch_bytes * (pass + 1) / passes);
    multiply_some_rows<Product, kProductRows>(product, first, end - first);
  }
}

inline Vec with_bias(const float* sums, const float* bias, int column) {
  const Vec sum = load(sums + column);
  return bias ? add(sum, load(bias + column)) : sum;
}

template <class T>
void store_panel(T* target, std::size_t stride, const float* sums, const float* bias, int rows, int columns) {
  for (int r = 0; r < rows; ++r, target += stride, sums += kPanelColumns) {
    for (int c = 0; c < columns; c += kWidth) store_first(target + c, with_bias(sums, bias, c), columns - c);
  }
}

void add_panel(float* target, std::size_t stride, const float* sums, const float* bias, int rows, int columns) {
  for (int r = 0; r < rows; ++r, target += stride, sums += kPanelColumns) {
    for (int c = 0; c < columns; c += kWidth) {
      store_first(target + c, add(load(target + c), with_bias(sums, bias, c)), columns - c);
    }
  }
}

template <class T>
void swiglu_panel(T* target, std::size_t stride, const float* sums, const float* bias, int rows, int columns) {
  for (int r = 0; r < rows; ++r, target += stride, sums += kPanelColumns) {
    for (int c = 0; c < columns; c += kWidth) {
      const Vec gate = with_bias(sums, bias, c);
      const Vec linear = with_bias(sums, bias, kPanelColumns / 2 + c);
      store_first(target + c, mul(silu(gate), linear), columns - c);
    }
  }
}

}  // namespace
}  // namespace caudex::kernels
