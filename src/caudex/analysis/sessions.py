"""Which conversation a request goes on with, where the log does not say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


class SessionFinder:
    """Gives a request the session that its opening turn is from, or (where the opening was dropped) the one that most
    of its turns are from; else a new one. Keeps one entry a distinct turn."""

    def __init__(self) -> None:
        self._session_of_turn: dict[Hashable, str] = {}
        self._count = 0

    def session_of(self, turns: Sequence[Hashable]) -> str:
        """The session of a request with these turns, of which those that tell nothing ("yes", a system prompt, a
        template's text) have been left out."""
        known = Counter(self._session_of_turn[turn] for turn in turns if turn in self._session_of_turn)
        session = self._session_of_turn.get(turns[0]) if turns else None
        if session is None and known:
            likeliest, count = known.most_common(1)[0]
            session = likeliest if count >= 2 and 2 * count >= len(turns) else None
        if session is None:
            session = f"conversation {self._count}"
            self._count += 1
        for turn in turns:
            self._session_of_turn[turn] = session
        return session
