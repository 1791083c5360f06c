"""From suspicions to findings: replay the log with each mend, keep what pays, in order of cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from caudex.analysis.breakers.candidate import Candidate, Place
from caudex.analysis.breakers.declared import find_declared_tool_breakers
from caudex.analysis.breakers.history import find_history_breakers
from caudex.analysis.breakers.linear import find_linear_history_breakers
from caudex.analysis.breakers.merging import merged
from caudex.analysis.breakers.passages import find_reordered
from caudex.analysis.breakers.rendering import find_template_breakers
from caudex.analysis.breakers.slots import find_slots
from caudex.analysis.breakers.splits import find_splits
from caudex.analysis.breakers.tools import find_tool_breakers
from caudex.analysis.replay import Replay, replay
from caudex.trace.chain import Int64Array
from caudex.trace.encode import PromptEncoder
from caudex.trace.request import Request

SEARCH_REQUESTS = 600
"""Mends are compared on this many requests from the front; those that pay are then replayed on the whole log."""

TIE = 0.005
"""Mends whose rates lie no further apart pay alike."""

_UNTELLING = dict.fromkeys(("passages_reordered", "few_shot_reordered"), 1) | dict.fromkeys(
    ("varying_value", "system_prompt_versions", "history_inserted", "history_rewritten"), 2
)
"""Kinds that say less of what the defect is, the higher the less: any other defect may look like one of these too."""

MAX_FINDINGS = 8
MAX_CANDIDATES = 24


@dataclass(frozen=True, slots=True)
class Finding:
    """A breaker with its cost. Rates are shares of prompt tokens served by an infinite cache.

    `hit_rate_if_mended` mends this one alone; `hit_rate_if_all_mended` mends it and all that cost more, which is what
    counts for a breaker hidden behind another. `requests` are those that would compute less, `tokens_lost` how much
    less in all: mended alone, or with the others mended already, whichever is more. So neither of two breakers that
    hide each other costs nothing, nor of two that are one defect. `place.token` is where prompts part in that log.
    """

    candidate: Candidate
    place: Place
    requests: int
    tokens_lost: int
    hit_rate_if_mended: float
    hit_rate_if_all_mended: float


def find_breakers(
    requests: list[Request],
    encoder: PromptEncoder,
    block_size: int,
    *,
    progress: Callable[[str], None] = lambda _: None,
    read: Callable[[str], str] = str,
) -> tuple[list[Finding], list[Request]]:
    """All breakers of a log, the costliest first, and the log with all of them mended; no findings, and the log as it
    is, for a clean one. Cost: a replay of the log for each mend.

    Greedy: of all suspected breakers mend the one that pays most, then look at what the others would still bring on
    top. So two views of one defect are reported once, and a defect hidden behind another is found.

    `read` turns text of the requests into what a person would read, where it stands for token ids.
    """
    sample = requests[:SEARCH_REQUESTS]
    candidates = merged(list(_candidates(sample, encoder, read)))
    if not candidates:
        return [], requests
    chosen = _greedy(sample, candidates, encoder, block_size, progress)
    if not chosen:
        return [], requests
    progress("replaying the mended log")
    return _findings(requests, chosen, encoder, block_size), _mended(requests, chosen)


def _candidates(requests: list[Request], encoder: PromptEncoder, read: Callable[[str], str]) -> Iterator[Candidate]:
    yield from find_slots(requests, read)
    yield from find_tool_breakers(requests)
    yield from find_declared_tool_breakers(requests, read)
    yield from find_history_breakers(requests)
    yield from find_linear_history_breakers(requests, read)
    yield from find_reordered(requests)
    yield from find_splits(requests)
    yield from find_template_breakers(requests, encoder)


def _greedy(
    requests: list[Request],
    candidates: list[Candidate],
    encoder: PromptEncoder,
    block_size: int,
    progress: Callable[[str], None],
) -> list[Candidate]:
    left = candidates[:MAX_CANDIDATES]
    chosen: list[Candidate] = []
    rate = replay(requests, encoder, block_size).hit_rate
    while left and len(chosen) < MAX_FINDINGS:
        progress(f"trying {len(left)} mends")
        rates = [replay(candidate.rewrite(requests), encoder, block_size).hit_rate for candidate in left]
        best = _best(left, rates)
        if rates[best] - rate < left[best].min_gain:
            best = _key_to_a_lock(requests, left, rate, encoder, block_size)
            if best < 0:
                break
        candidate = left.pop(best)
        chosen.append(candidate)
        requests = candidate.rewrite(requests)
        rate = rates[best] if rates[best] > rate else replay(requests, encoder, block_size).hit_rate
        if not left or _rate_with_all(requests, left, encoder, block_size) - rate < min(c.min_gain for c in left):
            break
    return chosen


def _best(candidates: list[Candidate], rates: list[float]) -> int:
    """The mend that pays most; of those that pay as much, one that says what the defect is."""
    equals = [number for number, rate in enumerate(rates) if rate >= max(rates) - TIE]
    return min(equals, key=lambda number: (_UNTELLING.get(candidates[number].kind, 0), -rates[number]))


def _rate_with_all(
    requests: list[Request], candidates: list[Candidate], encoder: PromptEncoder, block_size: int
) -> float:
    return replay(_mended(requests, candidates), encoder, block_size).hit_rate


def _mended(requests: list[Request], candidates: Iterable[Candidate]) -> list[Request]:
    for candidate in candidates:
        requests = candidate.rewrite(requests)
    return requests


def _key_to_a_lock(
    requests: list[Request], candidates: list[Candidate], rate: float, encoder: PromptEncoder, block_size: int
) -> int:
    """Two breakers one behind the other may each hide what the other costs: mending either alone brings nothing, both
    bring much. The one without which all mends together bring least; -1 if all together bring nothing."""
    if len(candidates) < 2:
        return -1

    everything = _rate_with_all(requests, candidates, encoder, block_size)
    if everything - rate < max(candidate.min_gain for candidate in candidates):
        return -1
    others = [candidates[:number] + candidates[number + 1 :] for number in range(len(candidates))]
    losses = [everything - _rate_with_all(requests, left, encoder, block_size) for left in others]
    worst = int(np.argmax(losses))
    return worst if losses[worst] >= candidates[worst].min_gain else -1


def _findings(
    requests: list[Request], chosen: list[Candidate], encoder: PromptEncoder, block_size: int
) -> list[Finding]:
    """Each mend alone, on top of all others, and on top of those that cost more; the costliest first."""

    def with_mends(numbers: Iterable[int]) -> list[Request]:
        """The log with some of the mends, made in the order in which they were chosen."""
        return _mended(requests, (chosen[number] for number in sorted(numbers)))

    @cache
    def replayed(numbers: frozenset[int]) -> Replay:
        return replay(with_mends(numbers), encoder, block_size)

    everyone = frozenset(range(len(chosen)))
    saved: list[Int64Array] = []
    places: list[Place] = []
    for number, candidate in enumerate(chosen):
        savings = {
            others: _saved(replayed(others), replayed(others | {number}))
            for others in (frozenset[int](), everyone - {number})
        }
        telling = max(savings, key=lambda others: int(savings[others].sum()))
        saved.append(savings[telling])
        places.append(replace(candidate.place, token=_token_offset(candidate, with_mends(telling), encoder)))
    order = sorted(everyone, key=lambda number: -int(saved[number].sum()))
    return [
        Finding(
            candidate=chosen[number],
            place=places[number],
            requests=int((saved[number] > 0).sum()),
            tokens_lost=int(saved[number].sum()),
            hit_rate_if_mended=replayed(frozenset({number})).hit_rate,
            hit_rate_if_all_mended=replayed(frozenset(order[:rank])).hit_rate,
        )
        for rank, number in enumerate(order, 1)
    ]


def _saved(before: Replay, after: Replay) -> Int64Array:
    saved: Int64Array = np.maximum(before.computed - after.computed, 0)
    return saved


def _token_offset(candidate: Candidate, requests: list[Request], encoder: PromptEncoder) -> int | None:
    """The first token in which the candidate's pair of requests differ."""
    if candidate.pair is None:
        return None
    a, b = encoder.encode([requests[index] for index in candidate.pair])
    shared = min(len(a), len(b))
    different = np.flatnonzero(a[:shared] != b[:shared])
    return int(different[0]) if len(different) else shared
