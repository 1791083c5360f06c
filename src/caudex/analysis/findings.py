"""Looks for breakers in whatever a log shows: its measurements, its text, or its token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from caudex.analysis.breakers.candidate import Candidate
from caudex.analysis.breakers.search import Finding, find_breakers
from caudex.analysis.corpus import Corpus
from caudex.analysis.measure import Measured
from caudex.analysis.mended import Mended, measure_mended
from caudex.analysis.results import Breaker
from caudex.analysis.retokenized import retokenized_outputs
from caudex.analysis.shape import shape_breakers
from caudex.analysis.token_text import TokenText
from caudex.sizing.kv_size import KvSize
from caudex.trace.encode import PromptEncoder
from caudex.trace.log import Log
from caudex.trace.render import RequestRenderer
from caudex.trace.request import Request


@dataclass(frozen=True, slots=True)
class Searched:
    """The breakers, the costliest first; the log without those that a rewrite mends; and over what was looked."""

    breakers: tuple[Breaker, ...]
    mended: Mended | None
    where: str


NOT_SEARCHED = Searched((), None, "not looked for")


@dataclass(frozen=True, slots=True)
class _Searchable:
    """Requests to look for breakers in, what encodes them, and how to show a candidate to people."""

    requests: list[Request]
    encoder: PromptEncoder
    shown: Callable[[Candidate], Candidate]
    read: Callable[[str], str] = str


def search_breakers(
    opened: Log,
    corpus: Corpus,
    measured: Measured,
    block_size: int,
    unit: int,
    kv: KvSize | None,
    stage: Callable[[str], None],
) -> Searched:
    found = [*shape_breakers(measured, unit), *retokenized_outputs(corpus.requests, measured)]
    searchable = _searchable(opened, corpus)
    if searchable is None:
        where = "in block sizes and routing only: hashes do not show what diverges"
        return Searched(tuple(found), None, where)
    findings, log = find_breakers(
        searchable.requests, searchable.encoder, block_size, progress=stage, read=searchable.read
    )
    found += [_breaker(finding, searchable.shown(finding.candidate)) for finding in findings]
    found.sort(key=lambda breaker: -breaker.tokens_lost)
    where = "in all requests"
    if not corpus.complete:
        where = f"in the first {len(corpus.requests):,} requests, {corpus.max_bytes >> 20} MiB of distinct text"
    mended = measure_mended(log, searchable.encoder, block_size, kv) if findings else None
    return Searched(tuple(found), mended, where)


def _searchable(opened: Log, corpus: Corpus) -> _Searchable | None:
    """A log of token ids is searched as text of one character a token; one of hashes not at all."""
    if opened.encoder is None or not corpus.requests:
        return None
    if opened.has_text:
        return _Searchable(corpus.requests, opened.encoder, lambda candidate: candidate)
    tokens = TokenText(opened.reader)
    requests = tokens.requests(corpus.requests)
    if requests is None:
        return None
    return _Searchable(requests, PromptEncoder(tokens, RequestRenderer()), tokens.shown, tokens.read)


def _breaker(finding: Finding, shown: Candidate) -> Breaker:
    return Breaker(
        kind=shown.kind,
        title=shown.title,
        where=replace(shown.place, token=finding.place.token),
        examples=shown.examples,
        requests=finding.requests,
        tokens_lost=finding.tokens_lost,
        hit_rate_if_mended=finding.hit_rate_if_mended,
        hit_rate_if_all_mended=finding.hit_rate_if_all_mended,
        mend=shown.mend,
        rule=shown.rule,
        details=shown.details,
    )
