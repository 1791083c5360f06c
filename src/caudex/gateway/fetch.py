"""One small request to a worker, for the gateway's own purposes."""

from __future__ import annotations

import asyncio

from caudex.gateway.http_messages import Header, head
from caudex.gateway.upstream_pool import UpstreamPool

_MAX_BYTES = 8_388_608


class _Whole:
    """Collects an answer."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.body = bytearray()

    def head(self, status: int, headers: list[Header]) -> None:
        self.status = status

    def data(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > _MAX_BYTES:
            self.failed(f"the answer is longer than {_MAX_BYTES} bytes")

    def ended(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def failed(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(OSError(why))


async def fetch(pool: UpstreamPool, path: str, timeout: float, api_key: str | None = None) -> tuple[int, bytes]:
    """GETs a path on a connection of its own; status and body, or OSError (TimeoutError among them)."""
    endpoint = pool.endpoint
    headers = [(b"host", endpoint.authority), (b"accept", b"*/*"), (b"connection", b"close")]
    if api_key is not None:
        headers.append((b"authorization", f"Bearer {api_key}".encode("latin-1")))
    async with asyncio.timeout(timeout):
        connection = await pool.connect()
        try:
            answer = _Whole()
            connection.exchange(head(f"GET {endpoint.base_path}{path} HTTP/1.1\r\n".encode(), headers), answer)
            await answer.done
            return answer.status, bytes(answer.body)
        finally:
            connection.close()
