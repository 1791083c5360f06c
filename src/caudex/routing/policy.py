"""The interface of a routing policy, and the policies by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from caudex.routing.fleet import Fleet
from caudex.routing.ranking import Ranking
from caudex.routing.request import RouteRequest


class Policy(Protocol):
    """Ranks workers for a request. Pure: no IO, no clock, no threads; `now` is in seconds and never decreases."""

    def rank(self, request: RouteRequest, fleet: Fleet, now: float) -> Ranking:
        """The eligible workers, best first. Until `record`, no later decision depends on it but by chance."""
        ...

    def record(self, request: RouteRequest, worker: int, now: float) -> None:
        """The request was sent to this worker, be it the first choice or not."""
        ...

    def forget(self, worker: int) -> None:
        """What this worker had cached is gone: it left, restarted, or was cleared."""
        ...

    def dump(self) -> bytes:
        """State worth keeping across a restart, for `load`; worker slots must mean the same then."""
        ...

    def load(self, state: bytes) -> None:
        """Takes back what `dump` gave; ValueError for anything else."""
        ...


class Stateless:
    """The part of `Policy` that a policy without memory needs."""

    def forget(self, worker: int) -> None:
        """There is nothing to forget."""

    def dump(self) -> bytes:
        return b""

    def load(self, state: bytes) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but was given {len(state)} bytes of it")


POLICIES: dict[str, tuple[str, str]] = {
    "random": ("caudex.routing.random", "RandomPolicy"),
    "round_robin": ("caudex.routing.round_robin", "RoundRobinPolicy"),
    "least_loaded": ("caudex.routing.least_loaded", "LeastLoadedPolicy"),
    "session": ("caudex.routing.session", "SessionPolicy"),
    "consistent_hash": ("caudex.routing.consistent_hash", "ConsistentHashPolicy"),
    "prefix": ("caudex.routing.prefix", "PrefixPolicy"),
    "prefix_exact": ("caudex.routing.prefix_exact", "PrefixExactPolicy"),
    "cost": ("caudex.routing.cost", "CostPolicy"),
}
"""Policy name -> module and class."""


def make_policy(name: str, **settings: Any) -> Policy:
    """The policy of this name, with its class's keyword arguments; ValueError names the policies there are."""
    if name not in POLICIES:
        raise ValueError(f"unknown routing policy {name!r}; choose one of {', '.join(sorted(POLICIES))}")
    module, cls = POLICIES[name]
    policy: Policy = getattr(import_module(module), cls)(**settings)
    return policy
