"""Which worker gave which response, for requests that build on one."""

from __future__ import annotations

from collections import OrderedDict


class ResponseHomes:
    """`previous_response_id` names state that only the worker has which made it, so it outranks every policy.

    The last `capacity` responses are remembered. O(1).
    """

    def __init__(self, capacity: int = 100_000) -> None:
        self._capacity = capacity
        self._homes: OrderedDict[str, int] = OrderedDict()

    def remember(self, response_id: str, worker: int) -> None:
        self._homes[response_id] = worker
        self._homes.move_to_end(response_id)
        if len(self._homes) > self._capacity:
            self._homes.popitem(last=False)

    def find(self, response_id: object) -> int | None:
        return self._homes.get(response_id) if isinstance(response_id, str) else None

    def forget(self, worker: int) -> None:
        """The worker's state is gone, and with it what could be built on."""
        for response_id in [key for key, home in self._homes.items() if home == worker]:
            del self._homes[response_id]
