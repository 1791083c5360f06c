"""A checkpoint's tensors by name, straight from its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

_SINGLE_FILE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_MAPPED_BYTES: Final = 32 << 20


class CheckpointWeights(Mapping[str, Tensor]):
    """Tensors are mapped from their files when they are asked for, and not kept: a model is packed one at a time.

    A file is mapped anew every few tensors, so that the pages of those that have been read count as nobody's memory.

    Raises:
        safetensors.SafetensorError: a file is damaged; may be raised when a tensor is asked for.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._opened: tuple[Path, Any] | None = None
        self._bytes_read = 0

    @classmethod
    def find(cls, directory: Path) -> CheckpointWeights | None:
        """The weights saved in `directory`, or None if they are in another format."""
        from safetensors import safe_open

        if (directory / _INDEX).is_file():
            places: dict[str, str] = json.loads((directory / _INDEX).read_text())["weight_map"]
            return cls({name: directory / file for name, file in places.items()})
        path = directory / _SINGLE_FILE
        if not path.is_file():
            return None
        with safe_open(path, framework="pt") as file:
            return cls(dict.fromkeys(file.keys(), path))

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file(self._files[name]).get_tensor(name)
        self._bytes_read += tensor.nbytes
        return tensor

    def _file(self, path: Path) -> Any:
        from safetensors import safe_open

        if self._opened is None or self._opened[0] != path or self._bytes_read > _MAPPED_BYTES:
            self._opened, self._bytes_read = (path, safe_open(path, framework="pt")), 0
        return self._opened[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
