"""Keys of blocks that mean the same to every process that would compute the same bits, and nothing to any other."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from caudex.cache import block_keys
from caudex.tiers.store import BlockKey


def fingerprint(parts: Mapping[str, str]) -> bytes:
    """32 bytes that differ whenever a part does; the order of the parts does not matter."""
    digest = hashlib.blake2b(digest_size=32, person=b"caudex-kv-parts")
    for name in sorted(parts):
        for text in (name, parts[name]):
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def key_scope(model: bytes, *, namespace: str, adapter: str, tenant: str) -> bytes:
    """What the keys of one sequence's blocks begin from, and their records carry: 32 bytes.

    Two sequences have a key in common only if they agree in all of it, so what is isolated in the pool is so in a tier.

    Args:
        model: fingerprint of all that the bits of the KV depend on, apart from the adapter and the tokens.
        namespace: the salt.
        adapter: names the adapter's weights; empty for none.
        tenant: empty where tenants share.
    """
    return fingerprint({"model": model.hex(), "namespace": namespace, "adapter": adapter, "tenant": tenant})


class KeyChain:
    """The keys of a sequence's first whole blocks; a block's key is SHA-256 over the one before it and its tokens.

    Costs 0.5 us a block of 16 tokens.
    """

    def __init__(self, scope: bytes, block_size: int) -> None:
        self.scope = scope
        self.keys: list[BlockKey] = []
        self._block_size = block_size

    @property
    def num_tokens(self) -> int:
        """How many tokens have keys."""
        return len(self.keys) * self._block_size

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Append the keys of the whole blocks of `tokens`, the sequence's tokens from `num_tokens` on."""
        parent = self.keys[-1] if self.keys else None
        self.keys += block_keys(
            tokens, self._block_size, hash="sha256", namespace=self.scope.hex(), secret=0, parent=parent
        )
