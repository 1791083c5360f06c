"""One finding for one defect that shows at several places: each application's prompt, each tool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from caudex.analysis.breakers.candidate import Candidate, Rewrite
from caudex.trace.request import Request

_NAMED_VALUES = frozenset({"clock", "request_id", "request_counter", "session_id", "user_name", "tenant_name"})
_CONTEXT_CHARS = 12


def merged(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates of one kind in the same part of requests (tools, system messages, user messages) become one, told at
    the place with most requests; `details` names the others. Values of no known kind are one defect only where the same
    text stands before them; versions, only of tools, which one release changes together."""
    groups: dict[tuple[object, ...], list[Candidate]] = defaultdict(list)
    for number, candidate in enumerate(candidates):
        groups[_defect(candidate) or (number,)].append(candidate)
    return [_one(group) for group in groups.values()]


def _defect(candidate: Candidate) -> tuple[object, ...] | None:
    """What candidates of one defect have in common; None for what stands alone."""
    place = candidate.place
    part = "tool" if place.tool is not None else place.role
    if candidate.kind in _NAMED_VALUES or candidate.kind == "whitespace_drift":
        return candidate.kind, part, "sessions" in candidate.details
    if candidate.kind == "system_prompt_versions" and part == "tool":
        return candidate.kind, part
    if candidate.kind == "varying_value" and candidate.examples[0].before.strip():
        return candidate.kind, part, candidate.examples[0].before[-_CONTEXT_CHARS:]
    return None


def _one(group: list[Candidate]) -> Candidate:
    if len(group) == 1:
        return group[0]
    main = max(group, key=lambda candidate: int(candidate.details.get("requests", 0)))
    others = [candidate.place.description for candidate in group if candidate is not main]
    return replace(
        main,
        rewrite=_all_of([candidate.rewrite for candidate in group]),
        details={**main.details, "also_at": others},
        min_gain=min(candidate.min_gain for candidate in group),
    )


def _all_of(rewrites: list[Rewrite]) -> Rewrite:
    def rewrite(requests: list[Request]) -> list[Request]:
        for each in rewrites:
            requests = each(requests)
        return requests

    return rewrite
