#pragma once

#include <cstddef>
#include <cstdint>

namespace caudex::routing {

/// A key stands for one chunk of a prompt and everything before it, so equal keys mean equal prefixes.
///
/// Keys are 64-bit, not cryptographic, and the same in every process (a snapshot outlives the one that wrote it). They
/// only ever choose a worker: a collision sends a prompt to a worker that does not hold it, which costs time and can
/// never give a wrong answer.
using Key = std::uint64_t;

/// The key that prompts of one namespace (model, adapter, tenant salt) start from.
Key root_key(const void* name, std::size_t num_bytes);

/// Keys of the whole chunks of `num_bytes` bytes: writes num_bytes / chunk_bytes keys to `out`. About 0.2 ns a byte, the chunks overlapping.
void chain_bytes(Key root, const void* data, std::size_t num_bytes, std::size_t chunk_bytes, Key* out);

}  // namespace caudex::routing
