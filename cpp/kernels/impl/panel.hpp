// Left operands times one packed panel, and what becomes of the sums. Included after product.hpp and elementwise.hpp.
#pragma once

#include <type_traits>

namespace caudex::kernels {
namespace {

// A panel is read in order, and so are the panels after it: fetch what comes so far behind into the second-level
// cache. From about 5 rows up this hides the memory behind the products; with fewer rows the processor's own
// prefetching keeps up, and asking for more only gets in its way (a third slower).
struct StreamPrefetch {
  static constexpr std::ptrdiff_t kDistance = 8192;
  static constexpr int kLeastRows = 5;
  const char* panel;
  StreamPrefetch after(int steps) const { return {panel + static_cast<std::ptrdiff_t>(steps) * (kPanelColumns * 4)}; }
  void at_step(int step) const {
    const char* line = panel + kDistance + static_cast<std::ptrdiff_t>(step) * (kPanelColumns * 4);
    __builtin_prefetch(line, 0, 2);
    __builtin_prefetch(line + 64, 0, 2);
  }
};

// Where V vectors of columns stand among those of a panel and, from 32 on, of the panel behind it.
template <int V>
struct Columns {
  int at[V];
  const char* weights(const PanelProduct& product, int v) const {
    const std::size_t panel_bytes = static_cast<std::size_t>(product.steps) * kPanelColumns * 4;
    return product.panel + at[v] / kPanelColumns * panel_bytes + at[v] % kPanelColumns * 4;
  }
  float* sums(const PanelProduct& product, int row, int v) const {
    const std::size_t panel_sums = static_cast<std::size_t>(product.rows) * kPanelColumns;
    return product.sums + at[v] / kPanelColumns * panel_sums + row * kPanelColumns + at[v] % kPanelColumns;
  }
};

// The product of R rows from `first` on with V vectors of columns.
template <class Product, int R, int V, class Prefetch>
inline void multiply_into(const PanelProduct& product, int first, const Columns<V>& columns, Prefetch prefetch) {
  const char* weights[V];
  typename Product::Sum sums[R][V];
  CAUDEX_UNROLL
  for (int v = 0; v < V; ++v) {
    weights[v] = columns.weights(product, v);
    CAUDEX_UNROLL
    for (int r = 0; r < R; ++r) sums[r][v] = zeros();
  }
  multiply_tile<Product, R, V>(sums, product.left + first * product.left_row, product.left_row, weights,
                               kPanelColumns * 4, product.steps, prefetch);
  CAUDEX_UNROLL
  for (int r = 0; r < R; ++r) {
    CAUDEX_UNROLL
    for (int v = 0; v < V; ++v) store(columns.sums(product, first + r, v), sums[r][v]);
  }
}

// Quantized weights as they are: V vectors of columns of a panel.
template <int V, class Prefetch>
class PlainWeights {
 public:
  PlainWeights(const PanelProduct& product, const Columns<V>& columns, Prefetch prefetch) : prefetch_(prefetch) {
    CAUDEX_UNROLL
    for (int v = 0; v < V; ++v) weights_[v] = columns.weights(product, v);
  }

  // sums[r][v] += the next group's products with R rows' values at `left`.
  template <int R>
  void multiply_group(Int (&sums)[R][V], const char* left, std::size_t left_row) {
    multiply_tile<ByteProduct, R, V>(sums, left, left_row, weights_, kPanelColumns * 4, kGroupSteps, prefetch_);
    prefetch_ = prefetch_.after(kGroupSteps);
    CAUDEX_UNROLL
    for (int v = 0; v < V; ++v) weights_[v] += kGroupSteps * kPanelColumns * 4;
  }

 private:
  const char* weights_[V];
  Prefetch prefetch_;
};

// The same of quantized rows and weights: a group's sums are in registers, and so are their totals, as far as there are
// registers left.
template <int R, int V, class Weights>
inline void multiply_groups_into(const PanelProduct& product, int first, const Columns<V>& columns, Weights weights) {
  const std::size_t left_row = product.left_row;
  const char* left = product.left + first * left_row;
  Vec totals[R][V];
  CAUDEX_UNROLL
  for (int v = 0; v < V; ++v) {
    CAUDEX_UNROLL
    for (int r = 0; r < R; ++r) totals[r][v] = zeros();
  }
  for (int group = product.steps / kGroupSteps; group > 0; --group, left += sizeof(QuantizedGroup)) {
    const auto row = [&](int r) { return reinterpret_cast<const QuantizedGroup*>(left + r * left_row); };
    Int sums[R][V];
    CAUDEX_UNROLL
    for (int r = 0; r < R; ++r) {
      CAUDEX_UNROLL
      for (int v = 0; v < V; ++v) sums[r][v] = splat_int(row(r)->offset);
    }
    weights.multiply_group(sums, left, left_row);
    CAUDEX_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec scale = splat(row(r)->scale);
      CAUDEX_UNROLL
      for (int v = 0; v < V; ++v) totals[r][v] = add(totals[r][v], mul(to_float(sums[r][v]), scale));
    }
  }
  CAUDEX_UNROLL
  for (int v = 0; v < V; ++v) {
    const Vec scale = load(product.scales + columns.at[v]);
    CAUDEX_UNROLL
    for (int r = 0; r < R; ++r) store(columns.sums(product, first + r, v), mul(totals[r][v], scale));
  }
}

template <class Product, int R, int V, class Prefetch>
inline void multiply_vectors(const PanelProduct& product, int first, const Columns<V>& columns, Prefetch prefetch) {
  if constexpr (std::is_same_v<Product, ByteProduct>) {
    multiply_groups_into<R>(product, first, columns, PlainWeights<V, Prefetch>(product, columns, prefetch));
  } else {
    multiply_into<Product, R>(product, first, columns, prefetch);
  }
}

template <class Product, int R, class Prefetch>
inline void multiply_rows(const PanelProduct& product, int first, Prefetch prefetch) {
  for (int column = 0; column < kPanelColumns; column += kProductVectors * kWidth) {
    Columns<kProductVectors> columns;
    CAUDEX_UNROLL
    for (int v = 0; v < kProductVectors; ++v) columns.at[v] = column + v * kWidth;
    multiply_vectors<Product, R>(product, first, columns, prefetch);
  }
}

// `rows` <= R rows, by the instance compiled for that number.
template <class Product, int R, class Prefetch>
inline void multiply_some_rows(const PanelProduct& product, int first, int rows, Prefetch prefetch) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_some_rows<Product, R - 1>(product, first, rows, prefetch);
  }
  multiply_rows<Product, R>(product, first, prefetch);
}

// Rows of the pass that waits for the panel, and brings it into the cache; so many are left for the passes after it that
// they take nearly as many each: 13 rows cost 7 + 6 and not 12 + 1. Of quantized rows the first pass takes all that it
// can, which hides the wait; the others then leave room in the registers for their totals.
template <class Product>
inline int first_pass(int rows) {
  if (rows <= kProductRows || std::is_same_v<Product, ByteProduct>) return rows < kProductRows ? rows : kProductRows;
  return rows / ((rows + kProductRows - 1) / kProductRows);
}

// Rows from `first` on, of a panel that is in the cache.
template <class Product>
void multiply_rest(const PanelProduct& product, int first) {
  constexpr int kPassRows = std::is_same_v<Product, ByteProduct> ? kQuantizedRows : kProductRows;
  const int left = product.rows - first, passes = (left + kPassRows - 1) / kPassRows;
  for (int pass = 0; pass < passes; ++pass) {
    const int begin = left * pass / passes, end = left * (pass + 1) / passes;
    multiply_some_rows<Product, kPassRows>(product, first + begin, end - begin, NoPrefetch{});
  }
}

template <class Product>
void multiply_panel(const PanelProduct& product) {
  const int first = first_pass<Product>(product.rows);
  if (first >= StreamPrefetch::kLeastRows) {
    multiply_some_rows<Product, kProductRows>(product, 0, first, StreamPrefetch{product.panel});
  } else {
    multiply_some_rows<Product, kProductRows>(product, 0, first, NoPrefetch{});
  }
  multiply_rest<Product>(product, first);
}

// `rows` <= R rows of two panels, 2 vectors of each at a time.
template <class Product, int R>
inline void multiply_rows_twice(const PanelProduct& product, int first, int rows) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_rows_twice<Product, R - 1>(product, first, rows);
  }
  for (int column = 0; column < kPanelColumns; column += 2 * kWidth) {
    const Columns<4> columns{{column, column + kWidth, kPanelColumns + column, kPanelColumns + column + kWidth}};
    multiply_vectors<Product, R>(product, first, columns, NoPrefetch{});
  }
}

// Half as many loads a product as `multiply_panel`, in the same order of sums. Where there are registers for 4 vectors
// of 6 rows only; elsewhere, and for quantized panels, of which one stays in the first-level cache, one after the other.
template <class Product>
void multiply_two_panels(const PanelProduct& product) {
  if constexpr (kAttentionVectors == 4 && kAttentionRows == 6 && !std::is_same_v<Product, ByteProduct>) {
    for (int first = 0; first < product.rows; first += kAttentionRows) {
      const int left = product.rows - first;
      multiply_rows_twice<Product, kAttentionRows>(product, first, left < kAttentionRows ? left : kAttentionRows);
    }
  } else {
    multiply_panel<Product>(product);
    PanelProduct second = product;
    second.panel += static_cast<std::size_t>(product.steps) * kPanelColumns * 4;
    second.sums += static_cast<std::size_t>(product.rows) * kPanelColumns;
    if (second.scales) second.scales += kPanelColumns;
    multiply_panel<Product>(second);
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
