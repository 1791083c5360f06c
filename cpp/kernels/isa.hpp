#pragma once

#include <string>
#include <vector>

#include "kernels/kernel_table.hpp"

namespace caudex::kernels {

// The names of the instruction sets this processor can run, best first: "avx512_bf16", "avx2", "generic".
std::vector<std::string> available_isas();

// The kernels for `name`; "auto" takes the best, or what the environment variable CAUDEX_ISA names.
// Throws std::invalid_argument, naming what is available, for an instruction set this processor lacks.
const KernelTable& kernels_for(const std::string& name);

}  // namespace caudex::kernels
