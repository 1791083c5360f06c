// A fuzz target over the whole interface of the cache. Each input is a cache's options and a list of calls.
#include <cstddef>
#include <cstdint>

#include "cache_player.hpp"

namespace {

constexpr unsigned kStepsBetweenChecks = 16;  // a check walks everything, and costs as much as many steps

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  caudex::test::Choices choices(data, size);
  caudex::test::CachePlayer player(choices);
  for (unsigned steps = 1; !choices.is_done(); ++steps) {
    player.step();
    if (steps % kStepsBetweenChecks == 0) player.check();
  }
  player.check();
  return 0;
}
