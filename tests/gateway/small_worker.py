"""A small OpenAI-compatible server, run as a process of its own: `python small_worker.py PORT`.

It answers with words made from the prompt, so that a right answer can be told from a wrong one, and keeps a cache of
prefixes of messages, so that `cached_tokens` is true. A request's `metadata` says how it should go: `words` and `gap`
(seconds between them), `die` ("before" or "mid": this process exits), `drop` (the connection is cut, before or mid),
`status`, `linger` (seconds between the last event and the end of the body). `GET /stats` tells what it has seen.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Coroutine
from typing import Any

STATS: dict[str, Any] = {"requests": 0, "finished": 0, "cancelled": 0, "salts": [], "authorizations": [], "targets": []}
CACHE: set[str] = set()
STARTED = time.time()


def words_for(prompt: str, count: int) -> list[str]:
    return [f"{prompt[:20]}-{i} " for i in range(count)]


def usage_of(body: dict[str, Any]) -> dict[str, Any]:
    texts = [message["content"] for message in body["messages"]]
    cached, prefix = 0, body.get("cache_salt") or ""
    for text in texts:
        prefix += "\0" + text
        cached += len(text) // 4 if prefix in CACHE and not body["metadata"].get("cold") else 0
        CACHE.add(prefix)
    total = sum(len(text) // 4 for text in texts) + 1
    return {"prompt_tokens": total, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


class Exchange:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self, body: dict[str, Any], headers: dict[str, str]) -> None:
        STATS["requests"] += 1
        STATS["salts"].append(body.get("cache_salt"))
        STATS["authorizations"].append(headers.get("authorization"))
        how = body.setdefault("metadata", {})
        self.fail(how, "before")
        await asyncio.sleep(how.get("prefill", 0.0))
        if how.get("status"):
            self.send(how["status"], b'{"error":{"message":"as asked"}}')
            return
        words = words_for(body["messages"][-1]["content"], how.get("words", 3))
        if body.get("stream"):
            await self.stream(body, words, how)
        else:
            await asyncio.sleep(how.get("gap", 0.0) * len(words))
            choice = {"index": 0, "message": {"role": "assistant", "content": "".join(words)}, "finish_reason": "stop"}
            answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            self.send(200, json.dumps({**answer, "usage": usage_of(body)}).encode())
        STATS["finished"] += 1

    async def stream(self, body: dict[str, Any], words: list[str], how: dict[str, Any]) -> None:
        self.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for i, word in enumerate(words):
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            self.chunk(
                event({"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]})
            )
            if i == len(words) // 2:
                await self.writer.drain()
                if "mid" in (how.get("die"), how.get("drop")):
                    self.chunk(b'data: {"half": "of an ev')
                    await asyncio.sleep(0.05)
                self.fail(how, "mid")
            await asyncio.sleep(how.get("gap", 0.0))
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": []}
            self.chunk(event({**usage, "usage": usage_of(body)}))
        self.chunk(b"data: [DONE]\n\n")
        await asyncio.sleep(how.get("linger", 0.0))
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def fail(self, how: dict[str, Any], when: str) -> None:
        if how.get("die") == when:
            os._exit(1)
        if how.get("drop") == when:
            self.writer.transport.abort()
            raise ConnectionError

    def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def send(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)


async def read_request(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
    if "chunked" in headers.get("transfer-encoding", ""):
        return method, target, headers, await read_chunks(reader)
    return method, target, headers, await reader.readexactly(int(headers.get("content-length", 0)))


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


async def work_unless_gone(reader: asyncio.StreamReader, answer: Coroutine[Any, Any, None]) -> None:
    """Waits for the answer to be given; cancels it when the client closes its connection."""
    work = asyncio.ensure_future(answer)
    while not work.done():
        await asyncio.wait({work}, timeout=0.02)
        if (reader.at_eof() or reader.exception() is not None) and not work.done():
            STATS["cancelled"] += 1
            work.cancel()
            raise ConnectionError
    await work


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            method, target, headers, raw = await read_request(reader)
            exchange = Exchange(reader, writer)
            if method == "POST":
                STATS["targets"].append(target)
                body = json.loads(raw)
                if target == "/v1/responses":
                    STATS["requests"] += 1
                    exchange.send(200, json.dumps({"object": "response", "id": f"resp_{os.urandom(8).hex()}"}).encode())
                else:
                    await work_unless_gone(reader, exchange.answer(body, headers))
                continue
            if target == "/stats":
                exchange.send(200, json.dumps(STATS).encode())
            elif target == "/metrics":
                page = f"process_start_time_seconds {STARTED}\nvllm:num_requests_running 0\n"
                exchange.send(200, page.encode(), "text/plain")
            elif target == "/v1/models":
                exchange.send(200, b'{"object":"list","data":[{"id":"m","object":"model"}]}')
            else:
                exchange.send(200, b"{}")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main(port: int) -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", port, backlog=512)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
