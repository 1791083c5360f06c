// A fuzz target for snapshots: a cache with some life behind it is saved, the file is damaged and given a right checksum,
// and loaded. It is refused whole, or it is a cache that goes on working.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "cache/hashing.hpp"
#include "cache_player.hpp"

namespace {

using caudex::test::CachePlayer;
using caudex::test::Choices;

constexpr std::size_t kHeaderBytes = 32;  // magic, version, size, checksum
constexpr std::size_t kSizeAt = 16, kChecksumAt = 24;

void put_number(std::string& file, std::size_t at, std::uint64_t value) {
  for (int i = 0; i < 8; ++i) file[at + i] = static_cast<char>(value >> (8 * i));
}

void make_plausible(std::string& file) {
  const std::string payload = file.substr(kHeaderBytes);
  std::uint8_t key[8];
  caudex::make_hasher("fold64", 0)->root(payload, key);
  std::memcpy(&file[kChecksumAt], key, sizeof key);
  put_number(file, kSizeAt, payload.size());
}

void damage(std::string& file, Choices& choices) {
  const std::size_t payload = file.size() - kHeaderBytes;
  const std::size_t at = kHeaderBytes + choices.below(static_cast<std::uint32_t>(payload));
  switch (choices.below(4)) {
    case 0: file[at] = static_cast<char>(choices.below(256)); break;
    case 1: file[at] = static_cast<char>(file[at] + 1); break;
    case 2: file.erase(at, 1 + choices.below(12)); break;
    default: file.insert(at, file.substr(at, 1 + choices.below(40))); break;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::size_t life = size / 2;
  Choices choices(data, life);
  CachePlayer player(choices);
  while (!choices.is_done()) player.step();
  std::string file = player.save();

  Choices damages(data + life, size - life);
  const bool has_right_checksum = damages.below(8) != 0;
  for (std::uint32_t count = damages.below(6); count > 0 && file.size() > kHeaderBytes; --count) damage(file, damages);
  if (has_right_checksum) make_plausible(file);
  player.restart_from(file, damages);
  return 0;
}
