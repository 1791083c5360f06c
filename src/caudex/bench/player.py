"""Sends a scene's requests and keeps what they measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from caudex.bench.client import Endpoint, Record, measure
from caudex.bench.corpus import Writer


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the scenes are. Lengths in tokens, aimed at; counts exact.

    `example_tokens` is the shared prefix of the PagedAttention paper's five-shot translation prompts (Kwon et al.,
    2023, section 6.4); its one-shot prompts share 80.
    """

    concurrency: int = 8
    questions: int = 32
    documents: int = 6
    document_tokens: int = 1_500
    sessions: int = 8
    turns: int = 4
    system_tokens: int = 300
    example_tokens: int = 341
    samples: int = 8
    streams: int = 8
    answer_tokens: int = 32
    decode_tokens: int = 128


@dataclass(slots=True)
class Player:
    """Sends a scene's requests and keeps their records.

    With `cold` every prompt gets a fresh number in front, so no cache anywhere can have its prefix: the same traffic,
    the same server, without prefix caching.
    """

    endpoint: Endpoint
    writer: Writer
    scale: Scale
    cold: bool = False
    on_record: Callable[[Record], None] = lambda record: None
    records: list[Record] = field(default_factory=list)

    async def complete(self, prompt: str, max_tokens: int, *, first: bool, n: int = 1) -> str:
        """One completion; its text."""
        return await self._ask(
            "/v1/completions", {"prompt": self._front() + prompt, "max_tokens": max_tokens}, first, n
        )

    async def chat(self, messages: list[dict[str, str]], max_tokens: int, *, first: bool, n: int = 1) -> str:
        """One turn of a conversation; the assistant's text."""
        if self.cold:
            head, *rest = messages
            messages = [head | {"content": self._front() + head["content"]}, *rest]
        return await self._ask("/v1/chat/completions", {"messages": messages, "max_tokens": max_tokens}, first, n)

    async def together(self, requests: Iterable[Coroutine[Any, Any, Any]]) -> None:
        """Run requests, at most `scale.concurrency` at a time, in their order."""
        gate = asyncio.Semaphore(self.scale.concurrency)

        async def pass_gate(request: Coroutine[Any, Any, Any]) -> None:
            async with gate:
                await request

        await asyncio.gather(*(pass_gate(request) for request in requests))

    async def _ask(self, path: str, body: dict[str, Any], first: bool, n: int) -> str:
        body |= {"temperature": 0} if n == 1 else {"n": n, "temperature": 0.8}
        if not self.endpoint.strict:
            body["ignore_eos"] = True
        record, text = await measure(self.endpoint, path, body, first=first or self.cold)
        self.records.append(record)
        self.on_record(record)
        return text

    def _front(self) -> str:
        return f"[{self.writer.nonce()}] " if self.cold else ""
