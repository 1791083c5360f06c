"""Progress bars, on stderr."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text


class RateColumn(ProgressColumn):
    """How many a second."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f}/s")


class LoadingBar:
    """A bar for each stage of loading, drawn from calls of `update(stage, done, total)`; gone when the last is full.

    Where stderr is no terminal each stage is one plain line. Where it cannot be written to, a full disk say, there is
    none: that is no reason not to serve.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=self._console, transient=True
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, stage: str, done: int, total: int) -> None:
        with suppress(OSError):
            self._show(stage, done, total)

    def _show(self, stage: str, done: int, total: int) -> None:
        if not self._console.is_terminal:
            self._print_once(stage)
            return
        if stage not in self._tasks:
            self._progress.start()
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)

    def close(self) -> None:
        with suppress(OSError):
            self._progress.stop()

    def _print_once(self, stage: str) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = TaskID(0)
            self._console.print(stage, highlight=False)


class CountBar:
    """One bar over a known number of requests; says what is being done beside it."""

    def __init__(self, total: int) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def advance(self, text: str, error: str | None) -> None:
        """One more is done. An error is shown at once, since the table at the end only counts them."""
        self._progress.update(self._task, advance=1, description=text)
        if error is not None:
            self._console.print(f"failed: {error}", style="red", markup=False)
