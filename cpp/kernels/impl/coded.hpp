// Products with coded panels (see kernel_table.hpp). Included after panel.hpp; for instruction sets whose vector header
// has `decode_pair`.
#pragma once

namespace caudex::kernels {
namespace {

// What comes next of a coded panel: its pairs of steps, and the weights that stand beside them.
class CodedReader {
 public:
  explicit CodedReader(const CodedPanel& panel)
      : upper_bytes_(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(panel.upper_bytes)))),
        at_(panel.data),
        patch_(panel.patches),
        end_(panel.patches + panel.num_patches) {}

  // The next pair of steps, as the plain panel has them: 2 vectors of each.
  void next(__m512i (&weights)[4], int pair) {
    decode_pair(weights, at_, upper_bytes_);
    at_ += kCodedPairBytes;
    if (patch_ != end_ && patch_->place / kPairWeights == static_cast<std::uint32_t>(pair)) patch(weights, pair);
  }

  void fetch_ahead() const {
    CAUDEX_UNROLL
    for (int line = 0; line < 3; ++line) __builtin_prefetch(at_ + StreamPrefetch::kDistance + 64 * line, 0, 2);
  }

 private:
  static constexpr std::uint32_t kPairWeights = 4 * kPanelColumns;

  __attribute__((noinline)) void patch(__m512i (&weights)[4], int pair) {
    alignas(64) bf16 plain[kPairWeights];
    CAUDEX_UNROLL
    for (int v = 0; v < 4; ++v) _mm512_store_si512(plain + v * kPanelColumns, weights[v]);
    for (; patch_ != end_ && patch_->place / kPairWeights == static_cast<std::uint32_t>(pair); ++patch_) {
      plain[patch_->place % kPairWeights] = patch_->weight;
    }
    CAUDEX_UNROLL
    for (int v = 0; v < 4; ++v) weights[v] = _mm512_load_si512(plain + v * kPanelColumns);
  }

  __m512i upper_bytes_;
  const char* at_;
  const WeightPatch* patch_;
  const WeightPatch* end_;
};

template <int R>
inline __attribute__((always_inline)) void accumulate_step(__m512 (&sums)[R][2], const char* left,
                                                           std::size_t left_row, __m512i first, __m512i second) {
  CAUDEX_UNROLL
  for (int r = 0; r < R; ++r) {
    const Bf16Product::Left row = Bf16Product::left(left + r * left_row);
    sums[r][0] = Bf16Product::accumulate(sums[r][0], row, {reinterpret_cast<__m512bh>(first)});
    sums[r][1] = Bf16Product::accumulate(sums[r][1], row, {reinterpret_cast<__m512bh>(second)});
  }
}

// The first R rows' products, in the order of sums of the plain panel's. With `plain` the decoded panel is left there.
template <int R>
void multiply_coded_rows(const PanelProduct& product, const CodedPanel& panel, char* plain) {
  CodedReader reader(panel);
  __m512 sums[R][2];
  CAUDEX_UNROLL
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zeros();
  const char* left = product.left;
  int step = 0;
  for (; step + 2 <= product.steps; step += 2, left += 2 * Bf16Product::kLeftStep) {
    __m512i weights[4];
    reader.next(weights, step / 2);
    if (R >= StreamPrefetch::kLeastRows) reader.fetch_ahead();
    if (plain) {
      CAUDEX_UNROLL
      for (int v = 0; v < 4; ++v) _mm512_store_si512(plain + (2 * step + v) * 64, weights[v]);
    }
    accumulate_step(sums, left, product.left_row, weights[0], weights[1]);
    accumulate_step(sums, left + Bf16Product::kLeftStep, product.left_row, weights[2], weights[3]);
  }
  if (step < product.steps) {
    __m512i weights[4];
    reader.next(weights, step / 2);
    if (plain) {
      CAUDEX_UNROLL
      for (int v = 0; v < 2; ++v) _mm512_store_si512(plain + (2 * step + v) * 64, weights[v]);
    }
    accumulate_step(sums, left, product.left_row, weights[0], weights[1]);
  }
  CAUDEX_UNROLL
  for (int r = 0; r < R; ++r) {
    CAUDEX_UNROLL
    for (int v = 0; v < 2; ++v) store(product.sums + r * kPanelColumns + v * kWidth, sums[r][v]);
  }
}

template <int R>
void multiply_some_coded_rows(const PanelProduct& product, const CodedPanel& panel, int rows, char* plain) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_some_coded_rows<R - 1>(product, panel, rows, plain);
  }
  multiply_coded_rows<R>(product, panel, plain);
}

// Decodes while the first pass multiplies; further passes read the decoded panel from the cache.
void multiply_coded_panel(const PanelProduct& product, const CodedPanel& panel, char* plain) {
  const int passes = (product.rows + kProductRows - 1) / kProductRows;
  multiply_some_coded_rows<kProductRows>(product, panel, product.rows / passes, passes > 1 ? plain : nullptr);
  for (int pass = 1; pass < passes; ++pass) {
    const int first = product.rows * pass / passes;
    const int rows = product.rows * (pass + 1) / passes - first;
    PanelProduct rest = product;
    rest.panel = plain;
    multiply_some_rows<Bf16Product, kProductRows>(rest, first, rows, NoPrefetch{});
  }
}

void decode_panel(char* target, const CodedPanel& panel, int steps) {
  CodedReader reader(panel);
  for (int step = 0; step < steps; step += 2, target += 4 * 64) {
    __m512i weights[4];
    reader.next(weights, step / 2);
    reader.fetch_ahead();
    const int vectors = step + 2 <= steps ? 4 : 2;
    for (int v = 0; v < vectors; ++v) _mm512_store_si512(target + v * 64, weights[v]);
  }
}

}  // namespace
}  // namespace caudex::kernels
