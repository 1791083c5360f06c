"""Progress bars on standard error, and errors told in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click


@contextmanager
def reading_progress(title: str) -> Iterator[tuple[Callable[[int, int], None], Callable[[str], None]]]:
    """A bar over the bytes of a file with its rate, and a way to name the stage that runs; silent where standard error
    is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total or None)

        def stage(name: str) -> None:
            bar.update(task, description=name)

        yield progress, stage


@contextmanager
def user_errors() -> Iterator[None]:
    """A user's mistake (a ValueError that names the value and the remedy) ends the command with one line, no trace."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
