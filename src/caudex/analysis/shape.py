"""Breakers that show in the measurements rather than in the text: block size, and requests spread blindly."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from caudex.analysis.breakers.candidate import Example, Place
from caudex.analysis.measure import Measured
from caudex.analysis.results import Breaker

MIN_LOST_TO_ROUNDING = 0.02
MIN_LOST_TO_SPREAD = 0.02
USUAL_BLOCK_SIZE = 16


def shape_breakers(measured: Measured, unit: int) -> Iterator[Breaker]:
    yield from _block_too_large(measured, unit)
    yield from _spread_over_replicas(measured)


def _block_too_large(measured: Measured, unit: int) -> Iterator[Breaker]:
    """Prompts share more than whole blocks of this size can hold. Told for blocks above the usual size, where the log
    shows finer than the block."""
    size = measured.trace.block_size
    finer = max(unit, USUAL_BLOCK_SIZE)
    if finer >= size:
        return
    most = np.maximum(measured.lengths - 1, 0)
    in_finer = np.minimum(measured.exact_tokens, most) // finer * finer
    lost = in_finer - measured.hit_tokens
    if measured.rate(lost) < MIN_LOST_TO_ROUNDING:
        return
    hit = int(np.argmax(lost))
    yield Breaker(
        kind="block_size_too_large",
        title=f"Blocks of {size} tokens are too large for what prompts share",
        where=Place("block size", token=int(measured.exact_tokens[hit])),
        examples=(
            Example(
                hit + 1,
                f"shares {measured.exact_tokens[hit]:,} tokens, {measured.hit_tokens[hit]:,} in whole blocks of {size}",
            ),
            Example(hit + 1, f"{in_finer[hit]:,} of them in whole blocks of {finer}"),
        ),
        requests=int((lost > 0).sum()),
        tokens_lost=int(lost.sum()),
        hit_rate_if_mended=measured.rate(in_finer),
        hit_rate_if_all_mended=measured.rate(in_finer),
        mend=f"Use blocks (pages) of {finer} tokens",
        details={"block_size": size, "suggested": finer},
    )


def _spread_over_replicas(measured: Measured) -> Iterator[Breaker]:
    """The log says which replica served each request: what each could serve alone, against one pool."""
    names = sorted({name for name in measured.replicas if name is not None})
    if len(names) < 2:
        return
    trace = measured.trace
    codes = {name: code for code, name in enumerate((*names, None))}
    apart = trace.reuse_within([codes[name] for name in measured.replicas]) * trace.block_size
    lost = measured.hit_tokens - apart
    if measured.rate(lost) < MIN_LOST_TO_SPREAD:
        return
    first, second = (measured.replicas.index(name) for name in names[:2])
    yield Breaker(
        kind="spread_over_replicas",
        title=f"Requests are spread over {len(names)} replicas without regard to what each has cached",
        where=Place("routing"),
        examples=(Example(first + 1, names[0]), Example(second + 1, names[1])),
        requests=int((lost > 0).sum()),
        tokens_lost=int(lost.sum()),
        hit_rate_if_mended=measured.rate(measured.hit_tokens),
        hit_rate_if_all_mended=measured.rate(measured.hit_tokens),
        mend="Route by prefix with bounded load, or keep a session on its replica",
        details={"replicas": len(names), "hit_rate_as_routed": measured.rate(apart)},
    )
