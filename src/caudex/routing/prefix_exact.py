"""Prefix affinity by what the workers themselves say they hold."""

from __future__ import annotations

from caudex.routing.event_index import EventIndex
from caudex.routing.prefix import PrefixPolicy


class PrefixExactPolicy(PrefixPolicy):
    """`prefix` over the workers' KV events, so what was evicted, restarted or sent by others is known.

    Needs requests whose keys are over tokens (`token_request`) with the workers' block size.

    Good for: fleets with several gateways, or caches under pressure. Not for: workers that publish no events.
    """

    def __init__(self, *, index: EventIndex | None = None, recent_weight: float = 0.1, seed: int = 0) -> None:
        self.events = EventIndex() if index is None else index
        super().__init__(index=self.events, recent_weight=recent_weight, seed=seed)
