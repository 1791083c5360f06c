"""What splits one cache into several: salts, adapters, models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from caudex.analysis.breakers.candidate import Candidate, Example, Place
from caudex.trace.request import Request

_SPLITS = {
    "cache_salt": (
        "salt",
        "cache_salt splits the cache into {count}",
        "Salt by trust group, not by user or request: requests that may share (one customer, one application) need one "
        "salt; or share only public prefixes, such as the system prompt",
    ),
    "lora_split": (
        "lora",
        "{count} LoRA adapters split the cache",
        "KV of one adapter cannot serve another; route each adapter to replicas of its own",
    ),
    "model_mix": (
        "model",
        "{count} models split the cache",
        "KV of one model cannot serve another; keep a conversation on one model, each model on its own replicas",
    ),
}


def find_splits(requests: list[Request]) -> Iterator[Candidate]:
    for kind, (attribute, title, mend) in _SPLITS.items():
        values = [getattr(request, attribute) for request in requests]
        counts = Counter(values)
        if len(counts) < 2:
            continue
        first, second = (values.index(value) for value, _ in counts.most_common(2))
        yield Candidate(
            kind=kind,
            title=title.format(count=len(counts)),
            place=Place({"salt": "cache_salt", "lora": "LoRA adapter", "model": "model"}[attribute]),
            examples=tuple(Example(requests[i].line, str(values[i])) for i in (first, second)),
            mend=mend,
            rewrite=lambda log, attribute=attribute: [replace(request, **{attribute: None}) for request in log],  # type: ignore[misc]
            pair=(first, second),
            details={"values": len(counts), "sessions_on_several": _sessions_on_several(requests, attribute)},
        )


def _sessions_on_several(requests: list[Request], attribute: str) -> int:
    seen: dict[str, set[str | None]] = {}
    for request in requests:
        if request.session is not None:
            seen.setdefault(request.session, set()).add(getattr(request, attribute))
    return sum(len(values) > 1 for values in seen.values())
