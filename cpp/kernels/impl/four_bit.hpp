// Products with panels in 4 bits (see kernel_table.hpp). Included after panel.hpp.
#pragma once

namespace caudex::kernels {
namespace {

// What turns the codes of one vector of columns, and of the columns 16 after them, into weights for 32 inputs.
struct Expansion {
  Int near_scale, far_scale;    // in both words of a column: times 16, and as it is
  Int near_offset, far_offset;  // in every byte

  static Expansion load(const char* parameters) {
    const Int packed = load_int(parameters), byte = splat_int(0xff), bytes = splat_int(0x01010101);
    return {mul_int(and_int(packed, byte), splat_int(0x00100010)),
            mul_int(and_int(shift_right<8>(packed), byte), splat_int(0x00010001)),
            mul_int(and_int(shift_right<16>(packed), byte), bytes), mul_int(shift_right<24>(packed), bytes)};
  }

  // Four products of a code and its scale a word, each where its place in the word leaves the sixteenth in the upper
  // byte of the product's lower half or in the lower byte of its upper half: no code needs to be shifted.
  void expand(Int codes, Int& near, Int& far) const {
    const Int upper = splat_int(static_cast<int>(0xff00ff00u));
    const auto products = [&](Int odd_code, Int even_code, Int scale) {
      return merge(low_products(and_int(codes, odd_code), scale), upper,
                   high_products(and_int(codes, even_code), scale));
    };
    near = add_int(products(splat_int(0x000f000f), splat_int(0x0f000f00), near_scale), near_offset);
    far = add_int(products(splat_int(0x00f000f0), splat_int(static_cast<int>(0xf000f000u)), far_scale), far_offset);
  }
};

// Weights of a panel in 4 bits: V / 2 vectors of columns and those 16 columns after each. What is expanded of them is
// left in a plain panel too, unless `plain` is null. What comes behind is fetched into the cache, also with a single row:
// unlike with more bits a weight, the processor's own prefetching does not keep up.
template <int V>
class FourBitWeights {
 public:
  FourBitWeights(const PanelProduct& product, int first_column, char* plain)
      : panel_(product.panel), column_(first_column), plain_(plain) {}

  template <int R>
  void multiply_group(Int (&sums)[R][V], const char* left, std::size_t left_row) {
    for (int half = 0; half < kGroupInputs / kScaledInputs; ++half, left += kScaledInputs) {
      multiply_half<R>(sums, left, left_row);
    }
  }

 private:
  // The next 32 inputs.
  template <int R>
  inline __attribute__((always_inline)) void multiply_half(Int (&sums)[R][V], const char* left, std::size_t left_row) {
    const char* codes = panel_ + column_ * 4;
    Expansion expansions[V / 2];
    CAUDEX_UNROLL
    for (int v = 0; v < V / 2; ++v) {
      expansions[v] = Expansion::load(codes + kScaledSteps * kFourBitStepBytes + v * kWidth * 4);
    }
    for (int step = 0; step < kScaledSteps; ++step, codes += kFourBitStepBytes) {
      fetch_ahead(step);
      Int weights[V];
      CAUDEX_UNROLL
      for (int v = 0; v < V / 2; ++v) {
        expansions[v].expand(load_int(codes + v * kWidth * 4), weights[v], weights[V / 2 + v]);
      }
      if (plain_) store_step(weights);
      CAUDEX_UNROLL
      for (int r = 0; r < R; ++r) {
        const ByteProduct::Left row = ByteProduct::left(left + r * left_row + step * 4);
        CAUDEX_UNROLL
        for (int v = 0; v < V; ++v) sums[r][v] = ByteProduct::accumulate(sums[r][v], row, ByteProduct::right(weights[v]));
      }
    }
    panel_ += kFourBitGroupBytes;
  }

  // The parameters' cache line with the first step's.
  void fetch_ahead(int step) const {
    const char* line = panel_ + StreamPrefetch::kDistance + step * kFourBitStepBytes;
    __builtin_prefetch(line, 0, 2);
    if (step == 0) __builtin_prefetch(line + kScaledSteps * kFourBitStepBytes, 0, 2);
  }

  void store_step(const Int (&weights)[V]) {
    CAUDEX_UNROLL
    for (int v = 0; v < V / 2; ++v) {
      char* target = plain_ + (column_ + v * kWidth) * 4;
      store_int(target, weights[v]);
      store_int(target + kPanelColumns / 2 * 4, weights[V / 2 + v]);
    }
    plain_ += kPanelColumns * 4;
  }

  const char* panel_;
  int column_;
  char* plain_;
};

// Vectors of columns of a panel from `column` on, and those 16 columns after each.
template <int V>
inline Columns<V> column_pairs(int column) {
  Columns<V> columns;
  CAUDEX_UNROLL
  for (int v = 0; v < V / 2; ++v) {
    columns.at[v] = column + v * kWidth;
    columns.at[V / 2 + v] = columns.at[v] + kPanelColumns / 2;
  }
  return columns;
}

template <int R>
void multiply_four_bit_rows(const PanelProduct& product, int rows, char* plain) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_four_bit_rows<R - 1>(product, rows, plain);
  }
  constexpr int V = kProductVectors;
  for (int column = 0; column < kPanelColumns / 2; column += V / 2 * kWidth) {
    multiply_groups_into<R>(product, 0, column_pairs<V>(column), FourBitWeights<V>(product, column, plain));
  }
}

// Expands while the first pass multiplies; further passes read the plain panel from the cache.
void multiply_four_bit_panel(const PanelProduct& product, char* plain) {
  const int first = first_pass<ByteProduct>(product.rows);
  multiply_four_bit_rows<kProductRows>(product, first, first < product.rows ? plain : nullptr);
  PanelProduct rest = product;
  rest.panel = plain;
  multiply_rest<ByteProduct>(rest, first);
}

}  // namespace
}  // namespace caudex::kernels
