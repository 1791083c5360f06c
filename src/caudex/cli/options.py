"""Options that teach: shown in groups, each with an environment variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from caudex.sizing.byte_size import parse_byte_size

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class GroupedOption(click.Option):
    """An option under a heading of its command's help. Its environment variable is CAUDEX_ and its first long name."""

    def __init__(self, *args: Any, group: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group
        if self.envvar is None and self.name is not None:
            longest = max(self.opts, key=len)
            self.envvar = "CAUDEX_" + longest.lstrip("-").replace("-", "_").upper()


class GroupedCommand(click.Command):
    """A command whose help lists GroupedOptions under their headings, in the order in which they were declared."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def option_group(group: str) -> Callable[..., Callable[[Decorated], Decorated]]:
    """`click.option` for one heading."""

    def option(*names: str, **attributes: Any) -> Callable[[Decorated], Decorated]:
        return click.option(*names, cls=GroupedOption, group=group, **attributes)

    return option


class ByteSize(click.ParamType[int]):
    """A number of bytes: 1073741824, 512M, 2GiB. Units are powers of 1,024."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        num_bytes = parse_byte_size(str(value))
        if num_bytes is None:
            self.fail(f"{value!r} is not a size; write a number of bytes, or 512M, or 2GiB", param, ctx)
        return num_bytes
