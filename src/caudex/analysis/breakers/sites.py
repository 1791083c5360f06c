"""Where in requests texts are compared with one another: a message, a tool's declaration, a plain prompt's head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from caudex.analysis.breakers.tools import canonical_tool
from caudex.analysis.corpus import head_lengths, text_of, tool_name
from caudex.trace.request import Request

HEAD_CHARS = 12000
"""A plain prompt is looked at up to here: what varies there costs most, and what comes later is its own history."""


@dataclass(frozen=True, slots=True)
class Site:
    """A position in requests whose texts are compared: message `index` (from the front), the tool called `tool`, or
    (where neither is given) a plain prompt's first `chars` characters."""

    index: int | None
    tool: str | None
    role: str | None
    chars: int = HEAD_CHARS

    @property
    def description(self) -> str:
        if self.tool is not None:
            return f"declaration of tool {self.tool!r}"
        if self.role is None:
            return "prompt"
        return f"{self.role} message" + (f" {self.index}" if self.index else "")

    @property
    def is_operators(self) -> bool:
        return self.tool is not None or self.role == "system"

    def text(self, request: Request) -> str | None:
        if self.tool is not None:
            return next(
                (_json(canonical_tool(tool)) for tool in request.tools or () if tool_name(tool) == self.tool), None
            )
        if self.role is None:
            return None if request.text is None else request.text[: self.chars]
        messages = request.messages or []
        if self.index is None or self.index >= len(messages) or messages[self.index].get("role") != self.role:
            return None
        return text_of(messages[self.index])

    def with_text(self, request: Request, text: str) -> Request:
        """The request with this text in place. A tool is written with its keys sorted, as `text` gives it: a mend
        writes all requests' tools, also those that it does not change."""
        if self.tool is not None:
            tools = [_parsed(text, tool) if tool_name(tool) == self.tool else tool for tool in request.tools or ()]
            return replace(request, tools=tools)
        if self.role is None:
            return replace(request, text=text + (request.text or "")[self.chars :])
        messages = list(request.messages or ())
        assert self.index is not None
        messages[self.index] = {**messages[self.index], "content": text}
        return replace(request, messages=messages)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _parsed(text: str, fallback: Any) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return fallback


def sites_of(requests: list[Request]) -> list[Site]:
    sites: dict[Site, None] = {}
    for request, head in zip(requests, head_lengths(requests), strict=True):
        if request.messages is None:
            sites[Site(None, None, None)] = None
            continue
        for index in range(min(head, 4)):
            sites[Site(index, None, "system")] = None
        if head < len(request.messages):
            sites[Site(head, None, str(request.messages[head].get("role")))] = None
        sites.update(dict.fromkeys(tool_sites_of(request)))
    return [site for site in sites if site.is_operators or site.role in {"user", None}]


def tool_sites_of(request: Request) -> list[Site]:
    return [Site(None, tool_name(tool), None) for tool in request.tools or ()]


def texts_at(site: Site, requests: list[Request]) -> dict[int, str]:
    """The text at a site for each request (by index); of a conversation's own words, as its first request had them."""
    texts: dict[int, str] = {}
    known: set[str] = set()
    for index, request in enumerate(requests):
        if site.role == "user" and request.session is not None:
            if request.session in known:
                continue
            known.add(request.session)
        text = site.text(request)
        if text is not None:
            texts[index] = text
    return texts
