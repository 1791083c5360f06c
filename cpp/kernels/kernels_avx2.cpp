#include "kernels/kernel_table.hpp"

#if defined(__x86_64__)

#include "kernels/simd/avx2.hpp"

#include "kernels/impl/table.hpp"

namespace caudex::kernels {
const KernelTable* avx2_kernels() {
  static constexpr KernelTable table = make_table("avx2");
  return &table;
}
}  // namespace caudex::kernels

#else

namespace caudex::kernels {
const KernelTable* avx2_kernels() { return nullptr; }
}  // namespace caudex::kernels

#endif
