"""One worker as the gateway knows it: address, state, connections, what is out there."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from caudex.gateway.upstream_pool import UpstreamPool


class WorkerState(Enum):
    """A worker gets new requests only while UP; one whose last probe was not answered only where there is no other."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"
    DRAINING = "draining"


class Outstanding(Protocol):
    """A request that is out at a worker."""

    def abandon(self, why: str) -> None:
        """The worker is dead: end this here."""
        ...

    def check_deadline(self, now: float) -> None:
        """Ends it if the worker has been silent for too long."""
        ...


FAILURES_TO_REST = 3
REST_SECONDS = 1.0


@dataclass(slots=True)
class Worker:
    slot: int
    pool: UpstreamPool
    state: WorkerState = WorkerState.STARTING
    cache_lost: bool = True
    """Whether it is known, since it was last UP, that nothing is cached there."""
    failed_probes: int = 0
    failures: int = 0
    resting_until: float = 0.0
    last_heard: float = 0.0
    generation: float | None = None
    """When the worker's process started, by its own metrics; another value is another process with an empty cache."""
    kv_usage: float | None = None
    outstanding: set[Outstanding] = field(default_factory=set)

    @property
    def url(self) -> str:
        return self.pool.endpoint.url

    @property
    def in_flight(self) -> int:
        return len(self.outstanding)

    def accepts(self, now: float) -> bool:
        return self.state is WorkerState.UP and self.failed_probes == 0 and now >= self.resting_until
