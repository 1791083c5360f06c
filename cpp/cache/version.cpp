#include "cache/version.hpp"

namespace caudex {

const char* version() { return CAUDEX_VERSION; }

}  // namespace caudex
