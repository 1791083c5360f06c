"""How often values occur again, without holding them as objects."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

_BUFFER = 1 << 15


class RepeatCounter:
    """Counts the values that have been added before, in 8 bytes a distinct one.

    Values gather in a buffer, then in sorted runs of doubling size (the log-structured merge tree of O'Neil et al.,
    1996): O(log size) a value, amortised.
    """

    def __init__(self) -> None:
        self._runs: list[npt.NDArray[np.int64]] = []
        self._buffer = array("q")
        self._repeats = 0

    def add(self, value: int) -> None:
        """Take a 64-bit value."""
        self._buffer.append(value)
        if len(self._buffer) >= _BUFFER:
            self._flush()

    @property
    def repeats(self) -> int:
        """Values so far that were there already when they were added."""
        self._flush()
        return self._repeats

    def _flush(self) -> None:
        added = np.array(self._buffer, dtype=np.int64)
        self._buffer = array("q")
        new = np.unique(added)
        for run in self._runs:
            places = np.minimum(run.searchsorted(new), len(run) - 1)
            new = new[run[places] != new]
        self._repeats += len(added) - len(new)
        while self._runs and len(self._runs[-1]) < 2 * len(new):
            new = np.sort(np.concatenate([self._runs.pop(), new]), kind="stable")
        if len(new):
            self._runs.append(new)
