#pragma once

namespace caudex {

// The version the core was built as; the Python package refuses a core of another version.
const char* version();

}  // namespace caudex
