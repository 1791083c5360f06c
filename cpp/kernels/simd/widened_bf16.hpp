// Products of bfloat16 for processors that cannot multiply pairs: both factors widened to float32. Included by a
// vector header after its `Vec`, `Pairs`, `load_pairs`, `even_halves` and `odd_halves`.
#pragma once

namespace caudex::kernels {
namespace {

struct Bf16Product {
  using Sum = Vec;
  struct Right {
    Vec even, odd;
  };
  struct Left {
    Vec even, odd;
  };
  static constexpr int kDepth = 2;
  static constexpr int kLeftStep = 8;
  static constexpr int kWeightDegree = 4;
  static Right right(const char* p) {
    const Pairs pairs = load_pairs(p);
    return {even_halves(pairs), odd_halves(pairs)};
  }
  static Left left(const char* p) {
    float values[2];
    __builtin_memcpy(values, p, sizeof(values));
    return {splat(values[0]), splat(values[1])};
  }
  static Vec accumulate(Vec sum, Left a, Right b) {
    return multiply_add(a.odd, b.odd, multiply_add(a.even, b.even, sum));
  }
  static void store_left(char* p, int index, Vec v) { store(reinterpret_cast<float*>(p) + index, v); }
};
constexpr int kBf16LeftElementSize = 4;

}  // namespace
}  // namespace caudex::kernels
