"""The name of a cache's namespace: a request's salt and, for keys and values under a LoRA adapter, the adapter."""

from __future__ import annotations

ADAPTER_SEPARATOR = "\x1f"
"""Stands between the two; no salt holds it."""


def join_namespace(salt: str, adapter: str | None) -> str:
    """Keys and values under an adapter are other ones than without, so it names a namespace of its own."""
    return salt if adapter is None else f"{salt}{ADAPTER_SEPARATOR}{adapter}"


def split_namespace(namespace: str) -> tuple[str, str | None]:
    """The salt and the adapter of which `join_namespace` made the name."""
    salt, separator, adapter = namespace.partition(ADAPTER_SEPARATOR)
    return salt, adapter if separator else None
