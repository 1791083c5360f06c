// A fuzz target over the whole interface of the cache. Each input is a cache's options and a list of calls.
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

#ifdef CAUDEX_FUZZ_MAIN
#include <fstream>
#include <iterator>

// Without libFuzzer: plays the files that it is given, such as a crash to be debugged.
int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  }
  return 0;
}
#endif
