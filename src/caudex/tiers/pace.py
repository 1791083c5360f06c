"""Running estimates: how long something takes, and how long to leave it alone after it failed."""

from __future__ import annotations

_NEWEST_SHARE = 0.3
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 60.0


class Pace:
    """Seconds a unit, as an exponentially weighted mean of what was observed; None before that."""

    def __init__(self) -> None:
        self.seconds_a_unit: float | None = None

    def observe(self, num_units: float, seconds: float) -> None:
        newest = seconds / num_units
        old = newest if self.seconds_a_unit is None else self.seconds_a_unit
        self.seconds_a_unit = (1 - _NEWEST_SHARE) * old + _NEWEST_SHARE * newest

    def seconds(self, num_units: float) -> float:
        """What so many units should take; 0 before anything was observed, so that it is tried."""
        return num_units * (self.seconds_a_unit or 0.0)


class Backoff:
    """A pause after every failure in a row, twice as long as the one before: a quarter of a second, to a minute."""

    def __init__(self) -> None:
        self._pause = 0.0
        self._ends_at = 0.0

    @property
    def has_failed(self) -> bool:
        return self._pause > 0

    def is_pausing(self, now: float) -> bool:
        return now < self._ends_at

    def fail(self, now: float) -> None:
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause or _FIRST_PAUSE)
        self._ends_at = now + self._pause

    def succeed(self) -> None:
        self._pause = self._ends_at = 0.0
