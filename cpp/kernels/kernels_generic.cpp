#include "kernels/simd/generic.hpp"

#include "kernels/impl/table.hpp"

namespace caudex::kernels {
const KernelTable* generic_kernels() {
  static constexpr KernelTable table = make_table("generic");
  return &table;
}
}  // namespace caudex::kernels
