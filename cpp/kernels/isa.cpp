#include "kernels/isa.hpp"

#include <cstdlib>
#include <stdexcept>

namespace caudex::kernels {
namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512_bf16() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
#else
bool has_avx2() { return false; }
bool has_avx512_bf16() { return false; }
#endif

std::vector<const KernelTable*> available_tables() {
  std::vector<const KernelTable*> tables;
  if (avx512_bf16_kernels() && has_avx512_bf16()) tables.push_back(avx512_bf16_kernels());
  if (avx2_kernels() && has_avx2()) tables.push_back(avx2_kernels());
  tables.push_back(generic_kernels());
  return tables;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_tables()) names.emplace_back(table->name);
  return names;
}

const KernelTable& kernels_for(const std::string& name) {
  const char* environment = std::getenv("CAUDEX_ISA");
  const bool from_environment = name == "auto" && environment != nullptr && *environment != '\0';
  const std::string wanted = from_environment ? environment : name;
  std::string choices;
  for (const KernelTable* table : available_tables()) {
    if (wanted == "auto" || wanted == table->name) return *table;
    choices += std::string(choices.empty() ? "" : ", ") + table->name;
  }
  throw std::invalid_argument("instruction set '" + wanted + "' is not available; this processor runs: " + choices);
}

}  // namespace caudex::kernels
