"""Which worker a request goes to, and whether what was believed of that worker was true."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

from caudex.gateway.attempt import Usage
from caudex.routing import Candidate, Ranking, Reason, RouteRequest

if TYPE_CHECKING:
    from caudex.gateway.gateway import Gateway

log = logging.getLogger("caudex.gateway")


class Decisions:
    """The gateway's policy at work, timed and counted; the same for what is relayed here and what Envoy relays."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def choose(
        self,
        features: RouteRequest,
        *,
        home: int | None = None,
        tried: Set[int] = frozenset(),
        again: int | None = None,
    ) -> Candidate | None:
        """The best worker not yet tried, or, where there is no other, the one that may be tried `again`. A `home`, if
        it is available, comes before all."""
        if not tried and home is not None and self._gateway.fleet.available[home]:
            return Candidate(home, Reason.SESSION, None)
        with self._timed():
            ranking = self._rank(features)
            if tried:
                candidates = list(ranking)
                fresh = [candidate for candidate in candidates if candidate.worker not in tried]
                repeated = [candidate for candidate in candidates if candidate.worker == again]
                candidate = next(iter(fresh or repeated), None)
            else:
                candidate = ranking.best
        self._count(candidate)
        return candidate

    def shortlist(
        self, features: RouteRequest, count: int, *, home: int | None = None, allowed: Set[int] | None = None
    ) -> list[Candidate]:
        """The best `count` workers in order, of those that are allowed (None: all). A `home` comes first and alone:
        no other worker has what the request builds on."""
        if home is not None and self._gateway.fleet.available[home] and (allowed is None or home in allowed):
            return [Candidate(home, Reason.SESSION, None)]
        with self._timed():
            ranking = self._rank(features)
            chosen = list(islice((c for c in ranking if allowed is None or c.worker in allowed), count))
        self._count(chosen[0] if chosen else None)
        return chosen

    def compare(self, candidate: Candidate, num_tokens: int, usage: Usage) -> None:
        """Holds a prediction against the truth: shares of the prompt, since `num_tokens` may be but an estimate."""
        if candidate.cached_tokens is None:
            return
        gateway, worker = self._gateway, self._gateway.workers.at(candidate.worker)
        expected = int(candidate.cached_tokens / num_tokens * usage.prompt_tokens)
        gateway.metrics.prompt_tokens.labels(worker.url).inc(usage.prompt_tokens)
        gateway.metrics.predicted.labels(worker.url).inc(expected)
        gateway.metrics.reported.labels(worker.url).inc(usage.cached_tokens)
        if gateway.honesty.observe(worker.slot, expected, usage.cached_tokens):
            log.warning(
                "worker %s: %.0f cached tokens a request were predicted and %.0f reported; its index is dropped",
                worker.url,
                *gateway.honesty.predicted_and_reported(worker.slot),
            )
            gateway.drop_index(worker, "drift")

    def _rank(self, features: RouteRequest) -> Ranking:
        return self._gateway.policy.rank(features, self._gateway.fleet, time.monotonic())

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._gateway.metrics.decision_seconds.observe(time.perf_counter() - began)

    def _count(self, candidate: Candidate | None) -> None:
        if candidate is not None:
            metrics, policy = self._gateway.metrics, self._gateway.settings.policy
            metrics.decisions.labels(policy, candidate.reason.label).inc()
