"""Backends, one a port, that answer every chat at once with five events: `python gateway_backend.py PORT...`.

A chat with the header `x-hold` gets one event and no end; `GET /closed` tells when such streams were closed by the
other side (seconds of the machine's monotonic clock). What else is posted gets a new response id.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time


def event(i: int) -> bytes:
    choice = {"index": 0, "delta": {"content": f"word{i} "}, "finish_reason": None if i < 4 else "stop"}
    data = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def sized(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = HEAD + b"".join(chunk(event(i)) for i in range(5)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
MODELS = sized(b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"x"}]}')
OTHER = sized(b'{"status":"ok","model_path":"m","served_model_name":"m"}')
NUMBERS = itertools.count()
CLOSED: list[float] = []


class Backend(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.data = bytearray()
        self.holding = False

    def connection_lost(self, error: Exception | None) -> None:
        if self.holding:
            CLOSED.append(time.monotonic())

    def data_received(self, data: bytes) -> None:
        self.data += data
        end = self.data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self.data[:end]).lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self.data) < end + 4 + length:
            return
        del self.data[: end + 4 + length]
        self.transport.write(self.answer(head))  # type: ignore[attr-defined]

    def answer(self, head: bytes) -> bytes:
        if head.startswith(b"post /v1/chat"):
            self.holding = b"\r\nx-hold:" in head
            return HEAD + chunk(event(0)) if self.holding else STREAM
        if head.startswith(b"post "):
            return sized(b'{"object":"response","id":"resp_%d"}' % next(NUMBERS))
        if head.startswith(b"get /closed"):
            return sized(json.dumps(CLOSED).encode())
        return MODELS if b"/v1/models" in head else OTHER


async def main() -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Backend, "127.0.0.1", int(port), backlog=4096) for port in sys.argv[1:]]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    asyncio.run(main())
