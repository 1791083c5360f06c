"""A backend that answers every chat at once with five events, and what else is posted with a new response id:
`python gateway_backend.py PORT`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys


def stream() -> bytes:
    events = []
    for i in range(5):
        choice = {"index": 0, "delta": {"content": f"word{i} "}, "finish_reason": None if i < 4 else "stop"}
        events.append({"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]})
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(line), line) for line in lines) + b"0\r\n\r\n"


def sized(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


STREAM = stream()
MODELS = sized(b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"x"}]}')
NUMBERS = itertools.count()
OTHER = sized(b'{"status":"ok","model_path":"m","served_model_name":"m"}')


class Backend(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.data = bytearray()

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
        self.transport.write(answer_to(head))  # type: ignore[attr-defined]


def answer_to(head: bytes) -> bytes:
    if head.startswith(b"post /v1/chat"):
        return STREAM
    if head.startswith(b"post "):
        return sized(b'{"object":"response","id":"resp_%d"}' % next(NUMBERS))
    return MODELS if b"/v1/models" in head else OTHER


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", int(sys.argv[1]), backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    asyncio.run(main())
