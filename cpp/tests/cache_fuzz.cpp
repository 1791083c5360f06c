// A fuzz target over the whole interface of the cache. Each input is a cache's options and a list of calls.
#include <cstddef>
#include <cstdint>

#include "cache_player.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  caudex::test::Choices choices(data, size);
  caudex::test::CachePlayer player(choices);
  while (!choices.is_done()) {
    player.step();
    player.check();
  }
  return 0;
}
