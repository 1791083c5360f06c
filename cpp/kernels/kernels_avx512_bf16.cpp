#include "kernels/kernel_table.hpp"

#if defined(__x86_64__)

#define CAUDEX_DECODES_WEIGHTS 1

#include "kernels/simd/avx512_bf16.hpp"

#include "kernels/impl/table.hpp"

namespace caudex::kernels {
const KernelTable* avx512_bf16_kernels() {
  static constexpr KernelTable table = make_table("avx512_bf16");
  return &table;
}
}  // namespace caudex::kernels

#else

namespace caudex::kernels {
const KernelTable* avx512_bf16_kernels() { return nullptr; }
}  // namespace caudex::kernels

#endif
