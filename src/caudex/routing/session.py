"""Session affinity: a conversation stays on the worker that holds its history."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np

from caudex.routing.fleet import Fleet
from caudex.routing.ranking import Ranking, Reason
from caudex.routing.request import RouteRequest


class _Home(msgspec.Struct, array_like=True):
    worker: int
    last_use: float


class SessionPolicy:
    """Requests of a session go where its last one went; new sessions, and requests without one, by load.

    A session whose worker is gone or unavailable is placed anew by load, and stays there. At most `max_sessions` are
    remembered, the least recently used dropped first, none beyond `idle_seconds`. O(1) beside the load.

    Good for: chats and agents. Not for: one long document or system prompt shared across sessions.
    """

    def __init__(self, *, max_sessions: int = 200_000, idle_seconds: float = 3_600.0, seed: int = 0) -> None:
        if max_sessions < 1:
            raise ValueError(f"max_sessions is {max_sessions}; it must be at least 1")
        self._max_sessions = max_sessions
        self._idle_seconds = idle_seconds
        self._rng = np.random.default_rng(seed)
        self._homes: OrderedDict[tuple[str, str], _Home] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def rank(self, request: RouteRequest, fleet: Fleet, now: float) -> Ranking:
        eligible = fleet.eligible(request.model)
        cost = np.where(eligible, fleet.load_tokens(), np.inf)
        reasons = np.full(len(cost), Reason.LOAD, dtype=np.int8)
        home = self._home(request, now)
        if home is not None and home < len(cost) and eligible[home]:
            cost[home] = -1.0
            reasons[home] = Reason.SESSION
        return Ranking(cost, reasons, self._rng, used=fleet.in_flight_tokens)

    def record(self, request: RouteRequest, worker: int, now: float) -> None:
        if request.session is None:
            return
        key = (request.tenant, request.session)
        self._homes[key] = _Home(worker, now)
        self._homes.move_to_end(key)
        while len(self._homes) > self._max_sessions or self._oldest_is_idle(now):
            self._homes.popitem(last=False)

    def forget(self, worker: int) -> None:
        for key in [key for key, home in self._homes.items() if home.worker == worker]:
            del self._homes[key]

    def dump(self) -> bytes:
        return msgspec.msgpack.encode([(*key, home) for key, home in self._homes.items()])

    def load(self, state: bytes) -> None:
        try:
            entries = msgspec.msgpack.decode(state, type=list[tuple[str, str, _Home]])
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a snapshot of sessions: {error}") from error
        self._homes = OrderedDict(((tenant, session), home) for tenant, session, home in entries)

    def _home(self, request: RouteRequest, now: float) -> int | None:
        if request.session is None:
            return None
        home = self._homes.get((request.tenant, request.session))
        return None if home is None or now - home.last_use > self._idle_seconds else home.worker

    def _oldest_is_idle(self, now: float) -> bool:
        oldest = next(iter(self._homes.values()))
        return now - oldest.last_use > self._idle_seconds
