"""Connections to one worker, kept for the next request."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from caudex.gateway.upstream_connection import UpstreamConnection

MAX_IDLE_SECONDS = 4.0
"""Below the five seconds after which uvicorn closes an idle connection: a request sent into a closing one is lost."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker listens."""

    url: str
    host: str
    port: int
    tls: bool
    base_path: str

    @property
    def authority(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode("ascii")


def parse_endpoint(url: str) -> Endpoint:
    """ValueError, saying what a worker's address looks like, for anything else."""
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ValueError(f"worker address {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise ValueError(f"worker address {url!r} does not look like http://host:port")
    base = parts.path.rstrip("/").removesuffix("/v1")
    normal = f"{parts.scheme}://{parts.netloc.lower()}{base}"
    return Endpoint(normal, parts.hostname, port, parts.scheme == "https", base)


class UpstreamPool:
    """Last in, first out, so that a burst's extra connections fall idle and are closed."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float) -> None:
        self.endpoint = endpoint
        self._connect_timeout = connect_timeout
        self._idle: list[UpstreamConnection] = []
        self._ssl = ssl.create_default_context() if endpoint.tls else None

    def take_idle(self, now: float) -> UpstreamConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since < MAX_IDLE_SECONDS:
                return connection
            connection.close()
        return None

    async def connect(self) -> UpstreamConnection:
        """A new connection; OSError if there is none within the connect timeout."""
        loop = asyncio.get_running_loop()
        endpoint = self.endpoint
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    UpstreamConnection, endpoint.host, endpoint.port, ssl=self._ssl
                )
        except TimeoutError:
            raise OSError(f"no connection within {self._connect_timeout} s") from None
        return connection

    def give_back(self, connection: UpstreamConnection, now: float) -> None:
        if connection.reusable and connection.is_open:
            connection.idle_since = now
            connection.was_reused = True
            self._idle.append(connection)
        else:
            connection.close()

    def close_stale(self, now: float) -> None:
        fresh = [c for c in self._idle if c.is_open and now - c.idle_since < MAX_IDLE_SECONDS]
        for connection in self._idle:
            if connection not in fresh:
                connection.close()
        self._idle = fresh

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
