"""A folder of files that together are one log, as one stream in the order of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from pathlib import Path

from caudex.trace.errors import TraceError
from caudex.trace.lines import Progress
from caudex.trace.request import Request

Opening = Callable[[], Iterator[Request]]


def files_in(folder: Path) -> list[Path]:
    """The files of a folder and its subfolders, by name, links that lead nowhere included; hidden ones are no part of
    a log. Raises TraceError where there are none."""
    found = (file for file in folder.rglob("*") if not file.name.startswith("."))
    files = sorted(file for file in found if file.is_file() or (file.is_symlink() and not file.exists()))
    if not files:
        raise TraceError(f"{folder} is a folder without files")
    return files


class FolderProgress:
    """Adds up how far the files of a folder have been read."""

    def __init__(self, files: Sequence[Path], progress: Progress | None) -> None:
        self._progress = progress
        self._num_bytes = sum(file.stat().st_size for file in files if file.exists())
        self._done = 0

    def of_file(self) -> Progress:
        """What one of the files reports to."""
        seen = 0

        def report(done: int, _: int) -> None:
            nonlocal seen
            self._done += done - seen
            seen = done
            if self._progress is not None:
                self._progress(self._done, self._num_bytes)

        return report


def merged_by_time(files: list[tuple[float, Opening]]) -> Iterator[Request]:
    """The requests of all files, each file's in its own order; a request without a time stands where it is in its file.

    `files` are the times of their first requests and what opens them. A file is opened when the time has come to its
    first request, so that files which follow each other (a rotated log) are never open at once. Memory and open files:
    those that overlap.
    """
    waiting = sorted(enumerate(files), key=lambda item: (item[1][0], item[0]), reverse=True)
    heads: list[tuple[float, int, Request, Iterator[Request]]] = []
    while heads or waiting:
        while waiting and (not heads or waiting[-1][1][0] < heads[0][0]):
            number, (start, opening) = waiting.pop()
            _push_next(heads, start, number, opening())
        if heads:
            time, number, request, rest = heappop(heads)
            yield request
            _push_next(heads, time, number, rest)


def _push_next(
    heads: list[tuple[float, int, Request, Iterator[Request]]], time: float, number: int, rest: Iterator[Request]
) -> None:
    request = next(rest, None)
    if request is not None:
        heappush(heads, (time if request.timestamp is None else request.timestamp, number, request, rest))
