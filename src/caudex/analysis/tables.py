"""Results as rows of plain dataclasses that turn into frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar, overload

Row = TypeVar("Row")


class Table(Sequence[Row], Generic[Row]):
    """Typed rows (frozen dataclasses) with `.to_polars()` and `.to_pandas()`; the frames' columns are the fields."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Table({len(self._rows)} rows)"

    def to_dicts(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self._rows]  # type: ignore[call-overload]

    def to_polars(self) -> Any:
        """The rows as a polars DataFrame (needs polars)."""
        import polars

        return polars.DataFrame(self.to_dicts())

    def to_pandas(self) -> Any:
        """The rows as a pandas DataFrame (needs pandas)."""
        import pandas

        return pandas.DataFrame(self.to_dicts())
