"""Which prefixes have been seen: the state of a cache that never evicts."""

from __future__ import annotations

import numpy as np

from caudex.trace.chain import Int64Array

_BUFFER = 1 << 15


class PrefixSet:
    """A set of prefix hashes in 8 bytes each, plus a small buffer.

    Hashes are prefix-chained, so a prompt's known prefixes are a leading run and its length is found by bisection:
    O(log length) probes of O(log size) a prompt. New hashes gather in a buffer, then in sorted runs of doubling size
    (the log-structured merge tree of O'Neil et al., 1996), which makes adding O(log size) a hash, amortised.
    """

    def __init__(self) -> None:
        self._runs: list[Int64Array] = []
        self._buffer: set[int] = set()

    def __len__(self) -> int:
        return sum(map(len, self._runs)) + len(self._buffer)

    def __contains__(self, value: int) -> bool:
        if value in self._buffer:
            return True
        for run in self._runs:
            index = int(run.searchsorted(value))
            if index < len(run) and run[index] == value:
                return True
        return False

    def leading_run(self, hashes: Int64Array) -> int:
        """How many of `hashes`, from the first on, are in the set."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if int(hashes[middle]) in self:
                low = middle + 1
            else:
                high = middle
        return low

    def visit(self, hashes: Int64Array) -> int:
        """`leading_run`, and then adds the rest."""
        known = self.leading_run(hashes)
        self._buffer.update(hashes[known:].tolist())
        if len(self._buffer) >= _BUFFER:
            self._flush()
        return known

    def _flush(self) -> None:
        run = np.sort(np.fromiter(self._buffer, dtype=np.int64, count=len(self._buffer)))
        self._buffer.clear()
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]), kind="stable")
        self._runs.append(run)
