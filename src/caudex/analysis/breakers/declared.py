"""Tools that a plain prompt declares in its own text, as JSON objects one behind the other: found as in requests.

prompt:  | system text | {"name": ...} sep {"name": ...} sep {"name": ...} | history ...
                       ^ start             only the first such run          ^ end

Each prompt is read as a request with these tools, the detectors for tools look at that, and the tools of their mends
are written back between the same texts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from caudex.analysis.align import common_start
from caudex.analysis.breakers.candidate import Candidate, Place, Rewrite
from caudex.analysis.breakers.sites import tool_sites_of
from caudex.analysis.breakers.slots import find_slots_at
from caudex.analysis.breakers.tools import find_tool_breakers
from caudex.trace.request import Request, Tool

SEARCHED_CHARS = 1 << 16
MAX_GAP_CHARS = 40
"""Between two declarations stands no more than this: a line break, a comma, a tag."""

_OBJECT = re.compile(r'\{(?=\s*")')
_SCHEMA_KEYS = frozenset({"parameters", "input_schema", "inputSchema"})
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class _Declared:
    """The declarations in `text[start:end]`, each as JSON and as written, with `gap` between one and the next."""

    start: int
    end: int
    tools: tuple[Tool, ...]
    written: tuple[str, ...]
    gap: str


def find_declared_tool_breakers(requests: list[Request], read: Callable[[str], str]) -> Iterator[Candidate]:
    declared = [_declared(request) for request in requests]
    known = [found for found in declared if found is not None]
    if len(known) < 2:
        return
    forms = {_key(tool): written for found in known for tool, written in zip(found.tools, found.written, strict=True)}
    gap = next(iter(Counter(found.gap for found in known if found.gap)), "\n")
    as_tools = [_with_tools(request, found) for request, found in zip(requests, declared, strict=True)]
    sites = list(dict.fromkeys(site for request in as_tools for site in tool_sites_of(request)))
    for candidate in (*find_tool_breakers(as_tools), *find_slots_at(sites, as_tools, read)):
        yield _in_text(candidate, requests, forms, gap)


def _in_text(candidate: Candidate, requests: list[Request], forms: dict[bytes, str], gap: str) -> Candidate:
    assert candidate.pair is not None
    first, second = (requests[index].text or "" for index in candidate.pair)
    char = common_start(first, second)
    return replace(
        candidate,
        place=Place(f"prompt, character {char}", tool=candidate.place.tool, char=char),
        rewrite=_written_back(candidate.rewrite, forms, gap),
        rule=None,
    )


def _written_back(mend: Rewrite, forms: dict[bytes, str], gap: str) -> Rewrite:
    """`mend` for requests whose tools are in their text. `forms` is how the log writes each tool."""

    def written(request: Request, declared: _Declared | None, mended: Request) -> Request:
        if declared is None or request.text is None or not mended.tools:
            return request
        tools = (declared.gap or gap).join(forms.get(_key(tool)) or _json(tool) for tool in mended.tools)
        text = request.text[: declared.start] + tools + request.text[declared.end :]
        return request if text == request.text else replace(request, text=text)

    def rewrite(log: list[Request]) -> list[Request]:
        declared = [_declared(request) for request in log]
        mended = mend([_with_tools(r, d) for r, d in zip(log, declared, strict=True)])
        return [written(r, d, m) for r, d, m in zip(log, declared, mended, strict=True)]

    return rewrite


def _with_tools(request: Request, declared: _Declared | None) -> Request:
    return request if declared is None else replace(request, tools=list(declared.tools))


def _key(tool: Tool) -> bytes:
    """A tool with its keys in the order in which they are written."""
    return msgspec.json.encode(tool)


def _json(tool: Tool) -> str:
    return json.dumps(tool, ensure_ascii=False)


def _declared(request: Request) -> _Declared | None:
    """The first run of declarations in a plain prompt; None where it has none."""
    if request.text is None or request.tools:
        return None
    text = request.text[:SEARCHED_CHARS]
    run: list[tuple[int, int, Tool]] = []
    for start, end, value in _objects(text):
        if run and start - run[-1][1] > MAX_GAP_CHARS:
            break
        if _is_tool(value):
            run.append((start, end, value))
    if not run:
        return None
    gap = text[run[0][1] : run[1][0]] if len(run) > 1 else ""
    written = tuple(text[start:end] for start, end, _ in run)
    return _Declared(run[0][0], run[-1][1], tuple(tool for _, _, tool in run), written, gap)


def _objects(text: str) -> Iterator[tuple[int, int, Any]]:
    """JSON objects in a text, the outermost only: where each begins and ends, and its value."""
    behind = 0
    for found in _OBJECT.finditer(text):
        if found.start() < behind:
            continue
        try:
            value, behind = _DECODER.raw_decode(text, found.start())
        except ValueError:
            continue
        yield found.start(), behind, value


def _is_tool(value: Any) -> bool:
    function = value.get("function", value)
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(_SCHEMA_KEYS & set(function))
