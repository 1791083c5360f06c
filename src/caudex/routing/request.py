"""What a policy may know of a request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caudex import _core

TEXT_CHUNK_BYTES = 64
"""Bytes of text under one key where no tokenizer is at hand: about 16 tokens, one block of most engines."""

BYTES_PER_TOKEN = 4.0
"""English and code under the vocabularies of today; scales estimates of length, never what matches."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """The features of one request that routing decides by.

    `keys` are the chain keys of the prompt's whole chunks (uint64, in order): a key stands for its chunk, everything
    before it, and the namespace (model, adapter, tenant salt), so two requests share a prefix exactly as far as their
    keys agree. Lengths are in tokens.
    """

    keys: NDArray[np.uint64]
    tokens_per_key: float
    num_tokens: int
    model: str = ""
    session: str | None = None
    tenant: str = ""
    priority: int = 0

    def prefix_key(self, num_tokens: int) -> int:
        """The key of the first `num_tokens` tokens, or of all there is; equal for all that share them."""
        if not len(self.keys):
            return 0
        return int(self.keys[min(len(self.keys), max(1, int(num_tokens / self.tokens_per_key))) - 1])


def namespace_root(model: str, salt: str) -> int:
    """The key that prompts of one model (or adapter) and one cache salt start from."""
    return _core.root_key(f"{len(model)}:{model}{salt}".encode())


def text_request(
    text: bytes, *, model: str = "", salt: str = "", session: str | None = None, tenant: str = "", priority: int = 0
) -> RouteRequest:
    """A request known by its text: keys over chunks of bytes, length estimated."""
    return RouteRequest(
        keys=_core.chain_bytes(namespace_root(model, salt), text, TEXT_CHUNK_BYTES),
        tokens_per_key=TEXT_CHUNK_BYTES / BYTES_PER_TOKEN,
        num_tokens=max(1, int(len(text) / BYTES_PER_TOKEN)),
        model=model,
        session=session,
        tenant=tenant,
        priority=priority,
    )


def token_request(
    tokens: NDArray[np.int32],
    *,
    block_size: int = 16,
    model: str = "",
    adapter: str = "",
    salt: str = "",
    session: str | None = None,
    tenant: str = "",
    priority: int = 0,
) -> RouteRequest:
    """A request known by its tokens: keys over blocks of `block_size`, as the workers' KV events name them."""
    return RouteRequest(
        keys=_core.chain_tokens(namespace_root(adapter, salt), tokens, block_size),
        tokens_per_key=float(block_size),
        num_tokens=max(1, len(tokens)),
        model=model,
        session=session,
        tenant=tenant,
        priority=priority,
    )
