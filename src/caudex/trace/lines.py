"""Lines of a log file, gz and zst included, read in a stream with bounded memory."""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, TypeAlias, cast

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

    def _decompressed(self) -> Frames | BinaryIO:
        magic = self._buffered.peek(4)[:4]
        if magic.startswith(GZIP_MAGIC):
            return Frames(self._buffered, lambda: zlib.decompressobj(wbits=31), GZIP_MAGIC)
        if magic == ZSTD_MAGIC:
            try:
                import zstandard
            except ImportError:
                raise TraceError(f"{self.path} is zstd: pip install 'caudex[analyze]' to read it") from None
            return Frames(self._buffered, lambda: zstandard.ZstdDecompressor().decompressobj(), ZSTD_MAGIC)
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
        chunk = self._stream.read(CHUNK_BYTES)
        if isinstance(self._stream, Frames):
            self.broken = self._stream.broken
        if self._progress is not None and self.num_bytes:
            self._progress(self._raw.tell(), self.num_bytes)
        return chunk


class _Decompressor(Protocol):
    """What zlib and zstandard both give."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes) -> bytes: ...


class Frames:
    """A compressed stream of one frame or several, read as far as it is sound: all before a damage is given, and
    `broken` then says what the damage is."""

    def __init__(self, source: io.BufferedReader, begin: Callable[[], _Decompressor], magic: bytes) -> None:
        self._source = source
        self._begin = begin
        self._magic = magic
        self._frame = begin()
        self.broken: str | None = None

    def read(self, size: int) -> bytes:
        """Some bytes, made of at most `size` compressed ones; none at the end."""
        while self.broken is None and (data := self._next(max(size >> 4, 4096))):
            try:
                if plain := self._frame.decompress(data):
                    return plain
            except Exception as error:  # zlib.error and zstandard.ZstdError have no common parent
                self.broken = f"the compressed file is damaged: {error}"
        if self.broken is None and not self._frame.eof:
            self.broken = "the compressed file breaks off"
        return b""

    def _next(self, size: int) -> bytes:
        """Compressed bytes, those of the next frame after a frame's end; none at the end of all."""
        if not self._frame.eof:
            return self._source.read(size)
        data = (self._frame.unused_data or self._source.read(size)).lstrip(b"\0")
        if not data:
            return b""
        data += self._source.read(len(self._magic)) if len(data) < len(self._magic) else b""
        if not data.startswith(self._magic):
            self.broken = "the compressed file is followed by bytes that are none of it"
            return b""
        self._frame = self._begin()
        return data
