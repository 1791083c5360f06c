#include <nanobind/nanobind.h>

#include "cache/version.hpp"

namespace caudex {
void bind_cache(nanobind::module_& m);
void bind_parity(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_lookup(nanobind::module_& m);
void bind_models(nanobind::module_& m);
void bind_offline(nanobind::module_& m);
void bind_routing(nanobind::module_& m);
}  // namespace caudex

NB_MODULE(_core, m) {
  m.doc() = "The compiled core of Caudex: hashing, index, pool, eviction, replay; CPU kernels.";
  m.attr("__version__") = caudex::version();
  caudex::bind_cache(m);
  caudex::bind_parity(m);
  caudex::bind_kernels(m);
  caudex::bind_lookup(m);
  caudex::bind_models(m);
  caudex::bind_offline(m);
  caudex::bind_routing(m);
}
