// A long random life: cache_soak OPERATIONS [SEED]. Caches of all kinds and sizes, each for some thousand calls.
#include <chrono>
#include <cstdlib>
#include <random>

#include "cache_player.hpp"

int main(int argc, char** argv) {
  const long operations = argc > 1 ? std::atol(argv[1]) : 1'000'000;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atol(argv[2])) : 1;
  std::mt19937 random(seed);
  long done = 0;
  int caches = 0;
  while (done < operations) {
    std::vector<std::uint8_t> bytes(1000 + random() % 60'000);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    caudex::test::Choices choices(bytes.data(), bytes.size());
    caudex::test::CachePlayer player(choices);
    const unsigned check_every = 1 + random() % 64;
    for (unsigned i = 0; !choices.is_done(); ++i, ++done) {
      player.step();
      if (i % check_every == 0) player.check();
    }
    player.check();
    ++caches;
  }
  std::printf("%ld operations on %d caches, seed %u: no complaint\n", done, caches, seed);
  return 0;
}
