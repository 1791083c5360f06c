"""Which worker gave which response, for requests that build on one."""

from __future__ import annotations

from collections import OrderedDict


class ResponseHomes:
    """`previous_response_id` names state that only the worker has which made it, so it outranks every policy.

    A response is its tenant's: asked for by another it is unknown. The last `capacity` responses are remembered. O(1).
    """

    def __init__(self, capacity: int = 100_000) -> None:
        self._capacity = capacity
        self._homes: OrderedDict[tuple[str, str], int] = OrderedDict()

    def remember(self, tenant: str, response_id: str, worker: int) -> None:
        key = (tenant, response_id)
        self._homes[key] = worker
        self._homes.move_to_end(key)
        if len(self._homes) > self._capacity:
            self._homes.popitem(last=False)

    def find(self, tenant: str, response_id: str) -> int | None:
        return self._homes.get((tenant, response_id))

    def forget(self, worker: int) -> None:
        """The worker's state is gone, and with it what could be built on."""
        for key in [key for key, home in self._homes.items() if home == worker]:
            del self._homes[key]

    def dump(self) -> list[tuple[str, str, int]]:
        """All that is remembered, oldest first."""
        return [(*key, home) for key, home in self._homes.items()]

    def load(self, entries: list[tuple[str, str, int]]) -> None:
        for tenant, response_id, worker in entries:
            self.remember(tenant, response_id, worker)
