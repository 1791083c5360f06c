"""Model output that comes back as other tokens: decoded and tokenised anew, or edited, between two turns.

earlier prompt:  | prompt |            output             |
later prompt:    | prompt | the same | differs  . . . .   | new turn |
                                     ^ KV of the rest of the output cannot be used

A cache holds the KV of generated tokens as generated. Needs a log with the token ids of prompts and of outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from caudex.analysis.breakers.candidate import Example, Place
from caudex.analysis.measure import Measured
from caudex.analysis.results import Breaker
from caudex.trace.chain import Int64Array, prefix_hashes, seed_of
from caudex.trace.request import Request

MIN_LOST = 0.003
MIN_ALIKE = 0.5
"""What has less of the output's tokens, in order, is another answer (a branch) and not this one written back."""

MAX_OUTPUTS = 16
MAX_COMPARED = 4000
SHOWN_IDS = 12
_ROOM = 1.25
"""The same text may take this many times the tokens when it is tokenised anew."""

_TITLES = {
    "output_retokenized": "Model output comes back as other tokens",
    "output_rewritten": "Model output is written back differently",
}
_MENDS = {
    "output_retokenized": "Send the generated token ids back as they are: do not tokenise their text anew",
    "output_rewritten": "Send the model's output back as it was: do not trim, strip or re-serialise it",
}


@dataclass(frozen=True, slots=True)
class _Return:
    """Request `later` repeats the prompt of `earlier` and then its output, the first `kept` tokens of it unchanged."""

    kind: str
    earlier: int
    later: int
    kept: int
    output: list[int]
    resent: Sequence[int]


def retokenized_outputs(requests: Sequence[Request], measured: Measured) -> Iterator[Breaker]:
    """A breaker for each kind of change. Costs are in whole blocks of output that were generated, came back and could
    not be served; the mended rate is the log's with these served."""
    size = measured.trace.block_size
    returns: dict[str, list[_Return]] = defaultdict(list)
    lost = np.zeros(len(measured.lengths), dtype=np.int64)
    for found in _returns(requests):
        begin = measured.lengths[found.earlier]
        most = min(int(begin) + len(found.output), int(measured.lengths[found.later]) - 1) // size * size
        served = max(int(begin + found.kept) // size * size, int(measured.hit_tokens[found.later]))
        lost[found.later] = max(most - served, 0)
        returns[found.kind].append(found)
    for kind, changed in returns.items():
        if measured.rate(lost[[found.later for found in changed]]) >= MIN_LOST:
            yield _breaker(kind, changed, lost, requests, measured)


def _returns(requests: Sequence[Request]) -> Iterator[_Return]:
    """Each request against the longest earlier prompt that it begins with, sessions or none."""
    if not any(isinstance(request.output, list) and request.token_ids for request in requests):
        return
    ends: dict[int, list[int]] = defaultdict(list)
    for later, request in enumerate(requests):
        if not request.token_ids:
            continue
        hashes = prefix_hashes(np.asarray(request.token_ids, dtype=np.int32), seed_of(*request.namespace)).tolist()
        begins = next((ends[end] for end in reversed(hashes[:-1]) if end in ends), None)
        if begins:
            change = _change(requests, begins, later)
            if change is not None:
                yield change
        if isinstance(request.output, list) and request.output:
            ends[hashes[-1]] = [*ends[hashes[-1]], later][-MAX_OUTPUTS:]


def _change(requests: Sequence[Request], begins: list[int], later: int) -> _Return | None:
    """How the output that fits best came back; None where one came back unchanged, or none came back at all."""
    prompt = requests[later].token_ids or []
    best: tuple[float, _Return] | None = None
    for earlier in begins:
        output = [token for token in requests[earlier].output or () if isinstance(token, int)]
        rest = prompt[len(requests[earlier].token_ids or ()) :]
        kept = _common_start(output, rest)
        if kept >= len(output) - 1:
            return None
        before, after = output[kept:][:MAX_COMPARED], rest[kept:][: int(_ROOM * (len(output) - kept)) + 8]
        alike, kind = _compared(before, after[: int(_ROOM * MAX_COMPARED)])
        whole = (kept + alike) / min(len(output), kept + MAX_COMPARED)
        if alike and whole >= MIN_ALIKE and (best is None or whole > best[0]):
            best = whole, _Return(kind, earlier, later, kept, output, rest)
    return None if best is None else best[1]


def _compared(before: Sequence[int], after: Sequence[int]) -> tuple[int, str]:
    """How many tokens the two have in common, in order, and what made the others differ: text tokenised otherwise puts
    a few tokens in the place of a few, an edit leaves tokens out or adds some."""
    blocks = SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()[:-1]
    replaced = moved = end_before = end_after = 0
    for block in blocks:
        gone, come = block.a - end_before, block.b - end_after
        replaced += max(gone, come) if gone and come else 0
        moved += max(gone, come) if not (gone and come) else 0
        end_before, end_after = block.a + block.size, block.b + block.size
    kind = "output_retokenized" if replaced >= moved else "output_rewritten"
    return sum(block.size for block in blocks), kind


def _common_start(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((count for count, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _breaker(
    kind: str, changed: list[_Return], lost: Int64Array, requests: Sequence[Request], measured: Measured
) -> Breaker:
    worst = max(changed, key=lambda found: int(lost[found.later]))
    own = np.zeros_like(lost)
    for found in changed:
        own[found.later] = lost[found.later]
    token = int(measured.lengths[worst.earlier]) + worst.kept
    mended = measured.rate(measured.hit_tokens + own)
    return Breaker(
        kind=kind,
        title=_TITLES[kind],
        where=Place(f"output of an earlier turn, its token {worst.kept}", token=token),
        examples=(
            _example(requests[worst.earlier].line, worst.output, worst.kept),
            _example(requests[worst.later].line, worst.resent, worst.kept),
        ),
        requests=int((own > 0).sum()),
        tokens_lost=int(own.sum()),
        hit_rate_if_mended=mended,
        hit_rate_if_all_mended=mended,
        mend=_MENDS[kind],
        details={"turns_changed": len(changed)},
    )


def _example(line: int, ids: Sequence[int], at: int) -> Example:
    shown = " ".join(map(str, ids[at : at + SHOWN_IDS]))
    return Example(line, shown, " ".join(map(str, ids[max(0, at - 6) : at])))
