"""Tool declarations that change from request to request: their order, their keys' order, which tools there are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from caudex.analysis.breakers.candidate import Candidate, Example, Place, Rewrite
from caudex.analysis.corpus import tool_name
from caudex.trace.request import Request, Tool


def canonical_tool(value: Any) -> Any:
    """A tool with its keys sorted, and lists of plain values (required, enum) sorted too: order carries no meaning."""
    if isinstance(value, dict):
        return {key: canonical_tool(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        items = [canonical_tool(item) for item in value]
        return sorted(items) if all(isinstance(item, str) for item in items) else items
    return value


def _key(value: Any) -> bytes:
    return msgspec.json.encode(value)


def find_tool_breakers(requests: list[Request]) -> Iterator[Candidate]:
    with_tools = [index for index, request in enumerate(requests) if request.tools]
    if len(with_tools) < 2:
        return
    for find in (_reordered, _keys_reordered, _set_changing):
        candidate = find(requests, with_tools)
        if candidate is not None:
            yield candidate


def _names(request: Request) -> tuple[str, ...]:
    return tuple(tool_name(tool) for tool in request.tools or ())


def _reordered(requests: list[Request], with_tools: list[int]) -> Candidate | None:
    orders: dict[tuple[str, ...], dict[tuple[str, ...], int]] = defaultdict(dict)
    for index in with_tools:
        names = _names(requests[index])
        orders[tuple(sorted(names))].setdefault(names, index)
    most = max(orders.values(), key=len)
    if len(most) < 2:
        return None
    (first, i), (second, j) = list(most.items())[:2]
    at = next(k for k, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    return Candidate(
        kind="tools_reordered",
        title=f"The same tools in {len(most)} different orders",
        place=Place(f"tools[{at}]", tool=first[at], char=0),
        examples=(
            Example(requests[i].line, ", ".join(first)[:200]),
            Example(requests[j].line, ", ".join(second)[:200]),
        ),
        mend="Send the tools in one fixed order (sorted by name) in every request",
        rewrite=lambda log: [_with_tools(request, _sorted_by_name) for request in log],
        pair=(i, j),
        rule={"rule": "sort_tools", "by": "name"},
        details={"orders": len(most)},
    )


def _sorted_by_name(tools: list[Tool]) -> list[Tool]:
    return sorted(tools, key=tool_name)


def _with_tools(request: Request, change: Any) -> Request:
    return replace(request, tools=change(request.tools)) if request.tools else request


def _keys_reordered(requests: list[Request], with_tools: list[int]) -> Candidate | None:
    forms: dict[bytes, dict[bytes, int]] = defaultdict(dict)
    keys: dict[int, tuple[bytes, bytes]] = {}
    for index in with_tools:
        for tool in requests[index].tools or ():
            if id(tool) not in keys:
                keys[id(tool)] = (_key(canonical_tool(tool)), _key(tool))
            canonical, raw = keys[id(tool)]
            forms[canonical].setdefault(raw, index)
    most = max(forms.values(), key=len)
    if len(most) < 2:
        return None
    (first, i), (second, j) = list(most.items())[:2]
    name = tool_name(msgspec.json.decode(first))
    char = next((k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
    return Candidate(
        kind="tool_keys_reordered",
        title=f"The same tools written with their keys in {len(most)} different orders",
        place=Place(f"declaration of tool {name!r}, character {char}", tool=name, char=char),
        examples=(
            Example(
                requests[i].line,
                first[char : char + 120].decode(errors="replace"),
                first[max(0, char - 40) : char].decode(errors="replace"),
            ),
            Example(
                requests[j].line,
                second[char : char + 120].decode(errors="replace"),
                second[max(0, char - 40) : char].decode(errors="replace"),
            ),
        ),
        mend="Write the tools' JSON one way: serialise them once, or with sorted keys",
        rewrite=lambda log: [
            _with_tools(request, lambda tools: [canonical_tool(tool) for tool in tools]) for request in log
        ],
        pair=(i, j),
        rule={"rule": "sort_tool_keys"},
        details={"forms": len(most)},
    )


def _set_changing(requests: list[Request], with_tools: list[int]) -> Candidate | None:
    """Other tools from request to request, and none in some requests of a conversation that has tools in others."""
    first_use: dict[frozenset[str], int] = {}
    frequency: Counter[str] = Counter()
    own_of_session: dict[str | None, frozenset[str]] = {}
    for index in with_tools:
        names = _names(requests[index])
        first_use.setdefault(frozenset(names), index)
        frequency.update(names)
        if requests[index].session is not None:
            own_of_session.setdefault(requests[index].session, frozenset(names))
    kits = _kits(list(first_use))
    most = max(kits, key=len)
    bare = next((n for n, r in enumerate(requests) if not r.tools and r.messages and r.session in own_of_session), None)
    if len(most) > 1:
        pair = first_use[most[0]], first_use[most[1]]
    elif bare is not None:
        pair = first_use[own_of_session[requests[bare].session]], bare
    else:
        return None
    sets = [frozenset(_names(requests[index])) for index in pair]
    odd = sorted(sets[0] ^ sets[1])
    return Candidate(
        kind="tool_set_changing",
        title=f"{len(most) + (bare is not None)} different sets of tools",
        place=Place("tools", tool=odd[0] if odd else None),
        examples=tuple(Example(requests[index].line, _set_shown(requests[index], odd)) for index in pair),
        mend="Send the same tools every time, in one order, and say which may be called with tool_choice",
        rewrite=_union_of_tools(requests, kits, frequency, own_of_session),
        pair=pair,
        details={"sets": len(most) + (bare is not None), "tools": len(frozenset().union(*most))},
    )


def _set_shown(request: Request, odd: list[str]) -> str:
    """A request's tools by name, those that not every request has first: lists are cut short where they are shown."""
    names = _names(request)
    told = sorted(names, key=lambda name: name not in odd)
    return ", ".join(told)[:200] or "no tools"


def _kits(sets: list[frozenset[str]]) -> list[list[frozenset[str]]]:
    """Groups sets of tools that belong to one application: those of which half or more lies in what the group has."""
    kits: list[list[frozenset[str]]] = []
    unions: list[frozenset[str]] = []
    for names in sorted(sets, key=len, reverse=True):
        for number, union in enumerate(unions):
            if 2 * len(names & union) >= len(names):
                kits[number].append(names)
                unions[number] |= names
                break
        else:
            kits.append([names])
            unions.append(names)
    return kits


def _union_of_tools(
    requests: list[Request],
    kits: list[list[frozenset[str]]],
    frequency: Counter[str],
    own_of_session: dict[str | None, frozenset[str]],
) -> Rewrite:
    declared: dict[str, Tool] = {}
    for request in requests:
        for tool in request.tools or ():
            declared.setdefault(tool_name(tool), tool)
    whole_kit: dict[frozenset[str], list[str]] = {}
    for kit in kits:
        order = sorted(frozenset().union(*kit), key=lambda name: (-frequency[name], name))
        whole_kit.update(dict.fromkeys(kit, order))

    def mend(request: Request) -> Request:
        names = frozenset(_names(request)) if request.tools else own_of_session.get(request.session, frozenset())
        order = whole_kit.get(names)
        if order is None:
            return request
        own = {tool_name(tool): tool for tool in request.tools or ()}
        return replace(request, tools=[own.get(name, declared[name]) for name in order])

    return lambda log: [mend(request) for request in log]
