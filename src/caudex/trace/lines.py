"""Lines of a log file, gz and zst included, read in a stream with bounded memory."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

from caudex.trace.errors import TraceError

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
"""A line longer than this is no request; it is counted as bad and never held in memory as a whole."""

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
BOM = b"\xef\xbb\xbf"

Progress: TypeAlias = Callable[[int, int], None]
"""Called as (bytes read from the file, bytes in the file or 0 where unknown)."""


class LogFile:
    """One file of a log (or standard input, as `-`).

    `lines()` yields (line number from 1, line without its end). A line that is too long is yielded as None, and so is
    the end of a compressed file that breaks off, after everything before it; `broken` then says why.
    """

    def __init__(self, path: str | Path, progress: Progress | None = None) -> None:
        self.path = str(path)
        self.broken: str | None = None
        self._progress = progress
        self._raw: BinaryIO
        if self.path == "-":
            self._raw, self.num_bytes = sys.stdin.buffer, 0
        else:
            file = Path(path)
            if not file.exists():
                raise TraceError(f"{self.path} does not exist")
            self._raw, self.num_bytes = file.open("rb"), file.stat().st_size
        self._buffered = cast("io.BufferedReader", io.BufferedReader(cast("io.RawIOBase", self._raw), CHUNK_BYTES))
        self._stream = self._decompressed()
        self._head = b""

    def close(self) -> None:
        if self.path != "-":
            self._raw.close()

    def _decompressed(self) -> BinaryIO:
        magic = self._buffered.peek(4)[:4]
        if magic.startswith(GZIP_MAGIC):
            return cast("BinaryIO", gzip.GzipFile(fileobj=self._buffered, mode="rb"))
        if magic == ZSTD_MAGIC:
            try:
                import zstandard
            except ImportError:
                raise TraceError(f"{self.path} is zstd: pip install 'caudex[analyze]' to read it") from None
            return cast("BinaryIO", zstandard.ZstdDecompressor().stream_reader(self._buffered, read_across_frames=True))
        return cast("BinaryIO", self._buffered)

    def peek(self, num_bytes: int = 1 << 16) -> bytes:
        """The file's first decompressed bytes, without consuming them."""
        while len(self._head) < num_bytes and (chunk := self._read()):
            self._head += chunk
        return self._head[:num_bytes]

    def read_all(self, limit: int) -> bytes:
        """The whole file; TraceError if it holds more than `limit` bytes."""
        parts = [self._take_head()]
        total = len(parts[0])
        while chunk := self._read():
            parts.append(chunk)
            total += len(chunk)
            if total > limit:
                raise TraceError(
                    f"{self.path} is one JSON document of more than {limit >> 20} MiB: write one request a line instead"
                )
        return b"".join(parts).removeprefix(BOM)

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        number, skipping = 0, False
        begun: list[bytes] = []
        chunk = self._take_head().removeprefix(BOM)
        while chunk or (chunk := self._read()):
            *ended, rest = chunk.split(b"\n")
            chunk = b""
            for piece in ended:
                number += 1
                line = b"".join((*begun, piece)) if begun else piece
                yield number, None if skipping or len(line) > MAX_LINE_BYTES else line.rstrip(b"\r")
                begun, skipping = [], False
            if not skipping:
                begun.append(rest)
                if sum(map(len, begun)) > MAX_LINE_BYTES:
                    begun, skipping = [], True
        if skipping or self.broken is not None:
            yield number + 1, None
        elif last := b"".join(begun):
            yield number + 1, last.rstrip(b"\r")

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        return head

    def _read(self) -> bytes:
        try:
            chunk = self._stream.read(CHUNK_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.broken = f"the compressed file breaks off: {error}"
            return b""
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            self.broken = f"the compressed file breaks off: {error}"
            return b""
        if self._progress is not None and self.num_bytes:
            self._progress(self._raw.tell(), self.num_bytes)
        return chunk
