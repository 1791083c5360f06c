"""Blocks in a Valkey or Redis server, shared by every replica that can reach it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from caudex.tiers.store import BlockKey

_PREFIX = b"caudex:kv:"
_SCHEMES = {"valkey": "redis", "redis": "redis", "valkeys": "rediss", "rediss": "rediss"}


class ValkeyStore:
    """One value a record. The server bounds its memory (`maxmemory` with an LRU policy) and `ttl` the age of what
    nobody used.

    Connecting and every reply have `timeout` seconds. What is read or found counts as used and lives for another `ttl`.

    Args:
        url: valkey://[user:password@]host[:port][/database]; valkeys:// for TLS. redis:// and rediss:// are the same.
        ttl: seconds.
        timeout: seconds.

    Raises:
        ImportError: the client library is missing; the message says how to get it.
        ValueError: the URL is none.
    """

    def __init__(self, url: str, ttl: int = 86_400, timeout: float = 1.0) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ImportError("a Valkey tier needs the client library: pip install 'caudex[valkey]'") from error
        parts = urlsplit(url)
        self.name = f"valkey:{parts.hostname}:{parts.port or 6379}"
        self._ttl = ttl
        self._error = redis.RedisError
        self._client: Any = redis.Redis.from_url(
            parts._replace(scheme=_SCHEMES[parts.scheme]).geturl(),
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
            decode_responses=False,
        )

    def count_prefix(self, keys: Sequence[BlockKey]) -> int:
        """One round trip. EXPIRE tells whether a key is there, renews it and marks it as used; the first comes last."""
        pipeline = self._client.pipeline(transaction=False)
        for key in reversed(keys):
            pipeline.expire(_PREFIX + key, self._ttl)
        found = self._ask(pipeline.execute)[::-1]
        return next((place for place, there in enumerate(found) if not there), len(keys))

    def get_many(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        names = [_PREFIX + key for key in keys]
        return list(self._ask(lambda: self._client.mget(names)))

    def put_many(self, records: Sequence[tuple[BlockKey, bytes]]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key, record in reversed(records):
            pipeline.set(_PREFIX + key, record, ex=self._ttl)
        self._ask(pipeline.execute)

    def close(self) -> None:
        self._client.close()

    def _ask(self, call: Callable[[], Any]) -> Any:
        """The answer; whatever goes wrong with the server is an OSError here."""
        try:
            return call()
        except self._error as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
