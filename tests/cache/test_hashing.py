"""Keys of blocks: chained, secret unless asked otherwise, and the published digests where those are chosen."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from caudex.cache import PrefixCache, block_keys, hasher_names

every = pytest.mark.parametrize("hash", hasher_names())


def chained(digest: object, tokens: list[int], block_size: int, namespace: str, secret: int) -> list[bytes]:
    assert callable(digest)
    head = struct.pack("<Q", secret)
    key = digest(head + bytes(32) + namespace.encode())
    keys = []
    for end in range(block_size, len(tokens) + 1, block_size):
        key = digest(head + key + np.array(tokens[end - block_size : end], "<i4").tobytes())
        keys.append(key)
    return keys


@pytest.mark.parametrize("block_size", [1, 3, 4, 5, 16, 300, 1000])
def test_sha256_is_the_standard_one(block_size: int) -> None:
    tokens = list(range(2500))
    expected = chained(lambda data: hashlib.sha256(data).digest(), tokens, block_size, "lora", 7)
    assert block_keys(tokens, block_size, hash="sha256", namespace="lora", secret=7) == expected


@pytest.mark.parametrize("block_size", [1, 6, 16, 245, 246, 247, 600, 2000])
def test_blake3_is_the_published_one(block_size: int) -> None:
    blake3 = pytest.importorskip("blake3").blake3
    tokens = list(range(2500))
    expected = chained(lambda data: blake3(data).digest(), tokens, block_size, "", 0)
    assert block_keys(tokens, block_size, hash="blake3") == expected


@every
def test_a_key_depends_on_all_that_precedes_it(hash: str) -> None:
    tokens = list(range(64))
    keys = block_keys(tokens, hash=hash)
    changed = block_keys([99, *tokens[1:]], hash=hash)
    assert len(set(keys + changed)) == 8
    assert block_keys(tokens, hash=hash, namespace="other")[0] != keys[0]
    assert block_keys(tokens, hash=hash, secret=1)[0] != keys[0]
    assert block_keys([*tokens[:32], 5], hash=hash) == keys[:2]


@every
def test_keys_are_secret_unless_asked_otherwise(hash: str) -> None:
    def stored(secret: int | None) -> list[int]:
        cache = PrefixCache(8, index="hash", hash=hash, secret=secret)
        cache.enable_events()
        seq = cache.begin(range(32))
        seq.allocate(32)
        seq.commit(32)
        ((kind, blocks, parent, tokens, _),) = cache.take_events()
        assert (kind, parent, tokens) == ("stored", None, list(range(32)))
        return blocks

    assert stored(None) != stored(None)
    assert stored(0) == [int.from_bytes(key[:8], "little") for key in block_keys(range(32), hash=hash)]
