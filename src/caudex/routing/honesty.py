"""Is the index right about a worker? Predicted against reported cached tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Tally:
    requests: float = 0.0
    predicted: float = 0.0
    reported: float = 0.0
    error: float = 0.0


class HonestyCheck:
    """Compares, for each worker, what was predicted to be cached with what the worker says was.

    Figures fade over about `window` requests. A worker has drifted when over at least half a window the mean absolute
    error exceeds `tolerance` of the larger of the two sums: its index should then be dropped and the tally begun anew.
    Predictions are estimates (text lengths in particular), so the tolerance is wide.
    """

    def __init__(self, *, window: int = 50, tolerance: float = 0.5, min_tokens: int = 64) -> None:
        if window < 2 or not 0 < tolerance <= 1:
            raise ValueError(f"window {window} must be at least 2 and tolerance {tolerance} in (0, 1]")
        self._window = window
        self._tolerance = tolerance
        self._min_tokens = min_tokens
        self._tallies: dict[int, _Tally] = {}

    def observe(self, worker: int, predicted_tokens: int, reported_tokens: int) -> bool:
        """Takes one answer in; True if the worker has now drifted."""
        tally = self._tallies.setdefault(worker, _Tally())
        fade = 1.0 - 1.0 / self._window
        tally.requests = tally.requests * fade + 1.0
        tally.predicted = tally.predicted * fade + predicted_tokens
        tally.reported = tally.reported * fade + reported_tokens
        tally.error = tally.error * fade + abs(predicted_tokens - reported_tokens)
        return self._has_drifted(tally)

    def forget(self, worker: int) -> None:
        self._tallies.pop(worker, None)

    def predicted_and_reported(self, worker: int) -> tuple[float, float]:
        """Mean tokens a request of late, predicted and reported."""
        tally = self._tallies.get(worker)
        if tally is None:
            return 0.0, 0.0
        return tally.predicted / tally.requests, tally.reported / tally.requests

    def _has_drifted(self, tally: _Tally) -> bool:
        if tally.requests < self._window / 2:
            return False
        larger = max(tally.predicted, tally.reported)
        return larger / tally.requests >= self._min_tokens and tally.error > self._tolerance * larger
