"""Floor 6: the command line. One small file a command; argument parsing and printing, no logic.

A command's module is imported only when that command runs, so `caudex --help` needs no PyTorch and starts at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

COMMANDS: dict[str, str] = {
    "analyze": "analyze",
    "kv-size": "kv_size",
    "trace": "trace",
    "bench": "bench",
    "demo": "demo",
    "serve": "serve",
    "route": "route",
    "simulate": "simulate",
}
"""Command name -> module in this package that holds its click command as `command`."""


class LazyGroup(click.Group):
    """A click group that imports a command's module when it is asked for, and not before."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"caudex.cli.{COMMANDS[cmd_name]}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an optional library that is not installed ends it with one line, not a traceback."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise click.ClickException(str(error)) from None


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="caudex", message="caudex %(version)s")
def main() -> None:
    """Prefix caching for LLM inference: serve, measure, analyse, route."""
