// Two cryptographic digests, small and portable. For keys that other processes must be able to trust.
#pragma once

#include <cstddef>
#include <cstdint>

namespace caudex {

inline constexpr std::size_t kDigestBytes = 32;

// FIPS 180-4.
void sha256(const std::uint8_t* data, std::size_t size, std::uint8_t* digest);

// github.com/BLAKE3-team/BLAKE3-specs, unkeyed, 32 bytes of output.
void blake3(const std::uint8_t* data, std::size_t size, std::uint8_t* digest);

}  // namespace caudex
