// Products with packed matrices, on every instruction set this machine has, beside a sum in double.
#include "kernels/packed_product.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "check.hpp"
#include "kernel_values.hpp"
#include "kernels/four_bit.hpp"
#include "kernels/isa.hpp"

using namespace caudex::kernels;
using caudex::test::Values;

namespace {

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16};
constexpr int kMostRows = 200;  // more than a block of rows

std::vector<int> row_counts() {
  std::vector<int> counts = {63, 64, 65, 191, 193, kMostRows};
  for (int rows = 1; rows <= 40; ++rows) counts.push_back(rows);
  return counts;
}

float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

struct Factors {
  DType dtype;
  int columns, depth;
  Values left, weights;  // [kMostRows][depth] and [columns][depth]

  // Weights like a trained matrix's; one in 100 is a zero, a denormal, or of any size up to 2^60, and so are all of
  // some panels, which cannot be coded then.
  Factors(DType dtype, int columns, int depth, std::mt19937& random)
      : dtype(dtype), columns(columns), depth(depth), left(dtype, kMostRows * depth), weights(dtype, columns * depth) {
    std::normal_distribution<float> normal;
    for (int i = 0; i < kMostRows * depth; ++i) left.set(i, random() % 20 == 0 ? 0.0f : normal(random));
    for (int column = 0; column < columns; ++column) {
      const bool wild = column / kPanelColumns % 3 == 1;
      for (int row = 0; row < depth; ++row) {
        const std::uint32_t any = random() % 2 << 31 | (random() % 187) << 23 | random() % (1 << 23);
        const bool odd = wild || random() % 100 == 0;
        weights.set(column * depth + row, !odd ? normal(random) : random() % 3 == 0 ? 0.0f : from_bits(any));
      }
    }
  }

  PackedMatrix pack(Arena& arena) const {
    PackedMatrix matrix(columns, depth, dtype, arena);
    for (int column = 0; column < columns; ++column) matrix.set_column(column, weights.at(column * depth), 1);
    return matrix;
  }
};

// The sums of rows [first_row, first_row + rows), [rows][columns].
std::vector<float> multiply(PackedProduct& product, const PackedMatrix& matrix, const Factors& factors, int first_row,
                            int rows) {
  const int columns = factors.columns, depth = factors.depth;
  Values input(factors.dtype, rows * depth);
  std::memcpy(input.at(0), factors.left.at(first_row * depth), rows * depth * element_size(factors.dtype));
  std::vector<float> output(rows * columns, std::numeric_limits<float>::quiet_NaN());
  const MatrixRows left{input.at(0), depth * element_size(factors.dtype), rows};
  product.run(Team::all(product.threads()), left, matrix,
              [&](int first, int count, int panel, const float* sums) {
                const int column = panel * kPanelColumns;
                product.kernels().store_f32(output.data() + first * columns + column, columns, sums, nullptr, count,
                                            std::min(kPanelColumns, columns - column));
              });
  return output;
}

bool same_bits(const std::vector<float>& a, const float* b) {
  return std::memcmp(a.data(), b, a.size() * sizeof(float)) == 0;
}

// Each product and each sum rounds once: off by less than `depth` + 1 roundings of the sum of magnitudes. Denormals may
// count as zeros.
void check_close(const Factors& factors, const std::vector<float>& sums) {
  const double rounding = std::ldexp(1.0, -23), smallest = std::ldexp(1.0, -126);
  for (int row = 0; row < kMostRows; ++row) {
    for (int column = 0; column < factors.columns; ++column) {
      double expected = 0.0, magnitude = 0.0, flushed = smallest;
      for (int i = 0; i < factors.depth; ++i) {
        const double a = factors.left[row * factors.depth + i], b = factors.weights[column * factors.depth + i];
        expected += a * b;
        magnitude += std::abs(a * b);
        flushed += smallest * (1.0 + std::abs(a) + std::abs(b));
      }
      const double tolerance = (factors.depth + 1) * rounding * magnitude + flushed;
      CHECK(std::abs(sums[row * factors.columns + column] - expected) <= tolerance);
    }
  }
}

// Any number of rows, from anywhere, as if they were alone.
void check_rows(PackedProduct& product, const PackedMatrix& matrix, const Factors& factors, std::mt19937& random,
                const std::vector<float>& one_by_one) {
  for (const int rows : row_counts()) {
    const int first = static_cast<int>(random() % (kMostRows - rows + 1));
    CHECK(same_bits(multiply(product, matrix, factors, first, rows), one_by_one.data() + first * factors.columns));
  }
}

std::vector<float> multiply_one_by_one(PackedProduct& product, const PackedMatrix& matrix, const Factors& factors) {
  std::vector<float> sums;
  for (int row = 0; row < kMostRows; ++row) {
    const std::vector<float> one = multiply(product, matrix, factors, row, 1);
    sums.insert(sums.end(), one.begin(), one.end());
  }
  return sums;
}

void products_are_right_and_the_same_in_any_batch() {
  std::mt19937 random(1);
  int coded = 0, plain = 0, patches = 0;
  for (const std::string& isa : available_isas()) {
    for (const DType dtype : kTypes) {
      for (const auto& [columns, depth] :
           {std::pair{1, 1}, {31, 2}, {32, 3}, {33, 64}, {100, 17}, {128, 65}, {224, 30}}) {
        ThreadPool threads(1 + static_cast<int>(random() % 3));
        PackedProduct product(kernels_for(isa), threads);
        const Factors factors(dtype, columns, depth, random);
        Arena arena;
        PackedMatrix matrix = factors.pack(arena);
        const std::vector<float> one_by_one = multiply_one_by_one(product, matrix, factors);
        check_close(factors, one_by_one);
        check_rows(product, matrix, factors, random, one_by_one);
        if (!product.encodes(dtype)) continue;
        Arena coded_arena;
        matrix.encode(coded_arena, threads);
        for (int panel = 0; panel < matrix.num_panels(); ++panel) {
          ++(matrix.is_coded(panel) ? coded : plain);
          patches += matrix.coded_panel(panel).num_patches;
        }
        CHECK(same_bits(multiply_one_by_one(product, matrix, factors), one_by_one.data()));
        check_rows(product, matrix, factors, random, one_by_one);
      }
    }
  }
  CHECK((coded > 0) == (plain > 0) && (coded > 0) == (patches > 0));
}

// Whole numbers of at most 127 in magnitude, and what one stands for.
float quantize(const std::vector<float>& values, std::vector<int>& numbers) {
  float most = 0.0f;
  for (const float value : values) most = std::max(most, std::abs(value));
  const bool zeros = most < kLeastMagnitude;
  const float inverse = zeros ? 0.0f : kMostByte / most;
  for (const float value : values) numbers.push_back(static_cast<int>(std::nearbyint(value * inverse)));
  return zeros ? 0.0f : most / kMostByte;
}

std::vector<float> slice(const Values& values, int first, int count) {
  std::vector<float> result(count);
  for (int i = 0; i < count; ++i) result[i] = values[first + i];
  return result;
}

// A column's weights in whole numbers, and what one stands for: rounded here, or as a matrix in 4 bits has them.
float quantized_column(const Factors& factors, const PackedMatrix& matrix, int column, std::vector<int>& numbers) {
  const std::vector<float> exact = slice(factors.weights, column * factors.depth, factors.depth);
  const float scale = quantize(exact, numbers);
  if (matrix.bits() == 8) return scale;
  std::vector<float> kept(factors.depth);
  matrix.get_column(column, kept.data());
  for (int row = 0; row < factors.depth; ++row) {
    numbers[row] = scale == 0.0f ? 0 : static_cast<int>(std::nearbyint(kept[row] / scale));
    CHECK(kept[row] == static_cast<float>(numbers[row]) * scale && std::abs(numbers[row]) <= 127);
  }
  return scale;
}

// One output, a number at a time.
float quantized_sum(const Factors& factors, const PackedMatrix& matrix, int row, int column) {
  std::vector<int> weights;
  const float weight_scale = quantized_column(factors, matrix, column, weights);
  float sum = 0.0f;
  for (int first = 0; first < factors.depth; first += kGroupInputs) {
    const int count = std::min(kGroupInputs, factors.depth - first);
    std::vector<int> inputs;
    const float scale = quantize(slice(factors.left, row * factors.depth + first, count), inputs);
    int whole = 0;
    for (int i = 0; i < count; ++i) whole += inputs[i] * weights[first + i];
    sum += static_cast<float>(whole) * scale;
  }
  return sum * weight_scale;
}

void check_quantized(const Factors& factors, const std::string& isa, int bits, std::mt19937& random) {
  ThreadPool threads(1 + static_cast<int>(random() % 3));
  PackedProduct product(kernels_for(isa), threads);
  Arena plain, arena;
  PackedMatrix matrix = factors.pack(plain);
  matrix.quantize(bits, arena, threads);
  const std::vector<float> one_by_one = multiply_one_by_one(product, matrix, factors);
  for (int row = 0; row < kMostRows; row += 7) {
    for (int column = 0; column < factors.columns; ++column) {
      const float expected = quantized_sum(factors, matrix, row, column);
      CHECK(std::memcmp(&one_by_one[row * factors.columns + column], &expected, sizeof(float)) == 0);
    }
  }
  check_rows(product, matrix, factors, random, one_by_one);
}

// The bits of the plain sum, on every instruction set, in any batch.
void quantized_products_are_exact() {
  std::mt19937 random(4);
  for (const DType dtype : kTypes) {
    for (const auto& [columns, depth] : {std::pair{1, 1}, {31, 2}, {33, 64}, {70, 65}, {128, 130}}) {
      const Factors factors(dtype, columns, depth, random);
      for (const std::string& isa : available_isas()) {
        for (const int bits : {8, 4}) check_quantized(factors, isa, bits, random);
      }
    }
  }
}

// Every group of 4-bit weights is read back as it was written, and is no farther off than even steps from its least to
// its largest are, but for what rounding to 8 bits costs.
void four_bits_are_near() {
  std::mt19937 random(6);
  std::vector<char> panel(2 * kFourBitGroupBytes);
  for (int trial = 0; trial < 20'000; ++trial) {
    std::int16_t targets[kScaledInputs];
    const int span = 1 + static_cast<int>(random() % 4065), low = -2032 + static_cast<int>(random() % (4065 - span + 1));
    for (std::int16_t& target : targets) target = static_cast<std::int16_t>(low + static_cast<int>(random() % span));
    const FourBitGroup group = FourBitGroup::nearest(targets);
    const int column = trial % kPanelColumns, first_row = trial / kPanelColumns % 2 * kScaledInputs;
    if (trial % (2 * kPanelColumns) == 0) std::fill(panel.begin(), panel.end(), 0);
    write_group(panel.data(), column, first_row, group);
    const FourBitGroup kept = read_group(panel.data(), column, first_row);
    CHECK(kept.scale == group.scale && kept.offset == group.offset);
    const auto [least, most] = std::minmax_element(targets, targets + kScaledInputs);
    const double step = (*most - *least) / 15.0;
    double squares = 0.0, even_squares = 0.0;
    for (int i = 0; i < kScaledInputs; ++i) {
      CHECK(kept.codes[i] == group.codes[i] && std::abs(kept.weight(i)) <= 127);
      const double even = step == 0.0 ? 0.0 : std::remainder(targets[i] - *least, step);
      squares += std::pow(targets[i] - 16 * kept.weight(i), 2);
      even_squares += even * even;
    }
    CHECK(std::sqrt(squares / kScaledInputs) <= std::sqrt(even_squares / kScaledInputs) + 16.0);
  }
}

// What is read back is within half a step of what was quantized.
void quantizing_rounds_to_the_nearest() {
  std::mt19937 random(5);
  ThreadPool threads(2);
  for (const DType dtype : kTypes) {
    const Factors factors(dtype, 150, 77, random);
    Arena plain, arena;
    PackedMatrix matrix = factors.pack(plain);
    matrix.quantize(8, arena, threads);
    for (int column = 0; column < factors.columns; ++column) {
      std::vector<float> weights(factors.depth);
      matrix.get_column(column, weights.data());
      const std::vector<float> exact = slice(factors.weights, column * factors.depth, factors.depth);
      double most = 0.0;
      for (const float weight : exact) most = std::max<double>(most, std::abs(weight));
      for (int row = 0; row < factors.depth; ++row) CHECK(std::abs(weights[row] - exact[row]) <= most / 127 * 0.5001);
    }
  }
}

// On any machine: what was packed and coded can be read back to the bit.
void coding_loses_nothing() {
  std::mt19937 random(2);
  ThreadPool threads(2);
  for (const int depth : {1, 2, 7, 64, 129}) {
    const Factors factors(DType::kBFloat16, 150, depth, random);
    Arena arena, coded_arena;
    PackedMatrix matrix = factors.pack(arena);
    for (int pass = 0; pass < 2; ++pass) {
      for (int column = 0; column < factors.columns; ++column) {
        std::vector<float> weights(depth);
        matrix.get_column(column, weights.data());
        for (int row = 0; row < depth; ++row) {
          const float expected = factors.weights[column * depth + row];
          CHECK(std::memcmp(&weights[row], &expected, sizeof(float)) == 0);
        }
      }
      if (pass == 0) matrix.encode(coded_arena, threads);
    }
  }
}

// An infinity or a NaN spoils the outputs it belongs to and no other.
void infinities_stay_in_their_row_and_column() {
  std::mt19937 random(3);
  constexpr int kRow = 70, kColumn = 40, kDepth = 24, kColumns = 96;
  for (const std::string& isa : available_isas()) {
    for (const DType dtype : kTypes) {
      ThreadPool threads(2);
      PackedProduct product(kernels_for(isa), threads);
      Factors factors(dtype, kColumns, kDepth, random);
      for (int i = 0; i < kMostRows * kDepth; ++i) factors.left.set(i, 1.0f);
      for (int i = 0; i < kColumns * kDepth; ++i) factors.weights.set(i, 0.5f);
      factors.left.set(kRow * kDepth + 5, std::numeric_limits<float>::infinity());
      factors.weights.set(kColumn * kDepth + 9, -std::numeric_limits<float>::infinity());
      Arena arena, coded_arena;
      PackedMatrix matrix = factors.pack(arena);
      for (int pass = 0; pass < 2; ++pass) {
        const std::vector<float> sums = multiply(product, matrix, factors, 0, kMostRows);
        for (int row = 0; row < kMostRows; ++row) {
          for (int column = 0; column < kColumns; ++column) {
            const float sum = sums[row * kColumns + column];
            if (row == kRow && column == kColumn) CHECK(std::isnan(sum));
            else if (row == kRow) CHECK(std::isinf(sum) && sum > 0);
            else if (column == kColumn) CHECK(std::isinf(sum) && sum < 0);
            else CHECK(sum == kDepth * 0.5f);
          }
        }
        if (!product.encodes(dtype)) break;
        if (pass == 0) matrix.encode(coded_arena, threads);
      }
    }
  }
}

}  // namespace

int main() {
  coding_loses_nothing();
  quantizing_rounds_to_the_nearest();
  four_bits_are_near();
  quantized_products_are_exact();
  infinities_stay_in_their_row_and_column();
  products_are_right_and_the_same_in_any_batch();
  std::puts("packed products are sound");
  return 0;
}
