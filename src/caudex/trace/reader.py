"""Reads a log of any known format as a stream of requests, and keeps count of what it could not read."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from caudex.trace.bodies import parse_object
from caudex.trace.errors import LengthsOnlyError, TooManyBadLinesError, TraceError
from caudex.trace.folder import FolderProgress, files_in, merged_by_time
from caudex.trace.hashes import HashReader, is_hash_object, is_lengths_only, refuse_lengths_only
from caudex.trace.lines import MAX_LINE_BYTES, LogFile, Progress
from caudex.trace.repeats import RepeatCounter
from caudex.trace.request import Request
from caudex.trace.serverlogs import is_sglang_event, parse_server_line, parse_sglang_event

MAX_BAD_SHARE = 0.05
MAX_DOCUMENT_BYTES = 2 << 30
REORDER_WINDOW = 512
EXAMPLES_SHOWN = 3
_BINARY_MAGICS = {
    b"PAR1": "a Parquet file that is not a Caudex trace",
    b"SQLi": "an SQLite database",
    b"PK\x03\x04": "a zip archive",
    **{
        b"\x80" + bytes([protocol]): "a Python pickle, as SGLang dumps requests; reading one would run code in it: log "
        "requests with --log-requests --log-requests-level 3 --log-requests-format json instead"
        for protocol in range(2, 6)
    },
}

_SERVER_LOG = re.compile(
    rb'Received request \S+: |Receive: obj=\w*ReqInput\(|Request \S+ details: |\] \{"timestamp": .*"event": "request\.'
)


_NO_PROMPTS_HINT = {
    "server log": ": vLLM logs prompts with --enable-log-requests at --log-level DEBUG, SGLang with --log-requests "
    "--log-requests-level 3"
}


@dataclass(slots=True)
class ReadReport:
    """What reading found. Every line is a request, bad, or (server logs) about something else: the sums close. A file
    of a folder that cannot be read at all is one bad line, and named in `bad_files`."""

    source: str
    format: str = ""
    lines: int = 0
    requests: int = 0
    bad_lines: int = 0
    other_lines: int = 0
    bad_examples: list[tuple[int, str]] = field(default_factory=list)
    bad_files: list[tuple[str, str]] = field(default_factory=list)
    warnings: Counter[str] = field(default_factory=Counter)

    def bad(self, line: int, reason: str) -> None:
        self.bad_lines += 1
        if len(self.bad_examples) < EXAMPLES_SHOWN:
            self.bad_examples.append((line, reason))

    def bad_file(self, name: str, reason: str) -> None:
        self.lines += 1
        self.bad_lines += 1
        self.bad_files.append((name, reason))

    def check(self, *, final: bool) -> None:
        """Stop a log that is not worth going on with.

        Raises:
            TooManyBadLinesError: more than 5 % of the lines are bad.
        TraceError: or (at the end) there was no request at all.
        """
        seen = self.lines - self.other_lines
        enough = final or self.lines >= 1000
        if enough and self.bad_lines > MAX_BAD_SHARE * max(seen, 1):
            raise TooManyBadLinesError(
                f"{self.source}: {self.bad_lines} of {seen} lines could not be read, more than 5 %. First: "
                + "; ".join(
                    [
                        *(f"{name}: {reason}" for name, reason in self.bad_files[:EXAMPLES_SHOWN]),
                        *(f"line {line}: {reason}" for line, reason in self.bad_examples),
                    ]
                )
            )
        if final and self.requests == 0:
            raise TraceError(
                f"{self.source} holds no request ({self.lines} lines read){_NO_PROMPTS_HINT.get(self.format, '')}"
            )


class LogReader:
    """A log as a stream of requests in the order of their times.

    `path` is a file, `-` for standard input, or a folder of files that together are one log. Requests whose times are
    out of order by less than `REORDER_WINDOW` requests (logs written when a request ends) are put in order; the rest
    stay where they are and are counted. Memory: one chunk of the file and the window.

    Args:
        field: the dotted path to the request in each line's object, where finding it by shape is not enough.
        block_size: tokens a hash id stands for, where the trace does not say.
        progress: called with bytes read and bytes in all.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        field: str | None = None,
        block_size: int | None = None,
        limit: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.path = str(path)
        self.report = ReadReport(self.path)
        self._field = field
        self._limit = limit
        self._hash_reader = HashReader(block_size)
        self._progress = progress
        self._is_folder = False

    def __iter__(self) -> Iterator[Request]:
        requests = self._in_time_order(self._checked(self._all_requests()))
        for number, request in enumerate(requests):
            if self._limit is not None and number >= self._limit:
                return
            yield request
        self.report.check(final=True)

    def _all_requests(self) -> Iterator[Request]:
        if self.path == "-" or not Path(self.path).is_dir():
            yield from self._file_requests(self.path, self._progress)
            return
        self._is_folder = True
        files = files_in(Path(self.path))
        progress = FolderProgress(files, self._progress)
        yield from merged_by_time(
            [(_first_time(file, self._field), partial(self._skippable_file, file, progress)) for file in files]
        )

    def _skippable_file(self, file: Path, progress: FolderProgress) -> Iterator[Request]:
        """The requests of a file of a folder; one that cannot be read, or not to its end, is told and left behind."""
        try:
            yield from self._file_requests(str(file), progress.of_file())
        except TooManyBadLinesError:
            raise
        except (TraceError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            self.report.bad_file(file.name, reason or str(error).removeprefix(str(file)).lstrip(": "))
        self.report.check(final=False)

    def _file_requests(self, path: str, progress: Progress | None) -> Generator[Request]:
        log = LogFile(path, progress)
        try:
            kind = _sniff(path, log.peek())
            self.report.format = kind
            if kind == "json document":
                yield from self._from_document(log)
            else:
                yield from self._from_lines(log, kind)
        finally:
            log.close()

    def _from_document(self, log: LogFile) -> Iterator[Request]:
        data = log.read_all(MAX_DOCUMENT_BYTES)
        if log.broken is not None:
            raise TraceError(f"{log.path}: {log.broken}")
        try:
            document = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise TraceError(f"{log.path} is neither JSON lines nor a JSON document: {error}") from None
        if isinstance(document, dict) and isinstance(document.get("data"), list):
            document = document["data"]
        for number, item in enumerate(document if isinstance(document, list) else [document], start=1):
            self.report.lines += 1
            yield from self._parse(item, number, log)

    def _bad(self, log: LogFile, number: int, reason: str) -> None:
        self.report.bad(number, f"{Path(log.path).name}: {reason}" if self._is_folder else reason)

    def _from_lines(self, log: LogFile, kind: str) -> Iterator[Request]:
        decode = msgspec.json.Decoder().decode
        for number, line in log.lines():
            if line is not None and not line.strip():
                continue
            self.report.lines += 1
            if line is None:
                self._bad(log, number, log.broken or f"longer than {MAX_LINE_BYTES >> 20} MiB, or cut off")
            elif kind == "server log":
                yield from self._parse_text(line, number, log)
            else:
                try:
                    value = decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    self._bad(log, number, f"not JSON: {error}")
                else:
                    yield from self._parse(value, number, log)
            self.report.check(final=False)

    def _parse_text(self, line: bytes, number: int, log: LogFile) -> Iterator[Request]:
        try:
            request = parse_server_line(line.decode(errors="replace"), number)
        except ValueError as error:
            self._bad(log, number, str(error))
            return
        if request is None:
            self.report.other_lines += 1
        else:
            yield request

    def _parse(self, value: Any, number: int, log: LogFile) -> Iterator[Request]:
        try:
            if is_hash_object(value) and self._field is None:
                yield from self._hash_reader.parse(value, number)
            elif is_sglang_event(value):
                if (request := parse_sglang_event(value, number)) is None:
                    self.report.other_lines += 1
                else:
                    yield request
            elif is_lengths_only(value):
                refuse_lengths_only(log.path, value)
            else:
                yield from parse_object(value, number, self._field)
        except TraceError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            self._bad(log, number, str(error))

    def _checked(self, requests: Iterator[Request]) -> Iterator[Request]:
        ids = RepeatCounter()
        first: Request | None = None
        try:
            for request in requests:
                first = first or request
                if not self._is_of_one_kind(request, first):
                    continue
                self.report.requests += 1
                if request.request_id is not None:
                    ids.add(hash(request.request_id))
                if request.hash_ids is not None and request.input_length is not None and request.block_size is not None:
                    self._check_lengths(request, request.hash_ids, request.input_length, request.block_size)
                yield request
        finally:
            if ids.repeats:
                self.report.warnings["requests whose id occurred before; kept, as they were served"] += ids.repeats

    def _is_of_one_kind(self, request: Request, first: Request) -> bool:
        """Whether a request can be compared with the log's first; hashes and text cannot."""
        if (request.hash_ids is None) != (first.hash_ids is None):
            has, had = ("text or tokens", "hash_ids") if request.hash_ids is None else ("hash_ids", "text or tokens")
            self.report.bad(request.line, f"has {has} where the log began with {had}; a log is one or the other")
            return False
        if (request.token_ids is None) != (first.token_ids is None):
            self.report.warnings[
                "requests in token ids among others in text; they match only if --tokenizer made the ids"
            ] += 1
        return True

    def _check_lengths(self, request: Request, ids: Sequence[int], input_length: int, block_size: int) -> None:
        if len(ids) < input_length // block_size:
            self.report.warnings[
                "requests with fewer hash_ids than their input_length fills; the rest counts as new"
            ] += 1
        elif len(ids) > -(-input_length // block_size):
            self.report.warnings[
                "requests with more hash_ids than their input_length has blocks; the rest is ignored"
            ] += 1

    def _in_time_order(self, requests: Iterator[Request]) -> Iterator[Request]:
        window: list[tuple[float, int, Request]] = []
        order = count()
        last = float("-inf")
        for request in requests:
            time = request.timestamp
            if time is None:
                self.report.warnings["requests without a time; taken in file order"] += 1
                time = window[-1][0] if window else last
            heapq.heappush(window, (time, next(order), request))
            if len(window) > REORDER_WINDOW:
                time, _, oldest = heapq.heappop(window)
                last = self._note_order(time, last)
                yield oldest
        while window:
            time, _, oldest = heapq.heappop(window)
            last = self._note_order(time, last)
            yield oldest

    def _note_order(self, time: float, last: float) -> float:
        if time < last:
            self.report.warnings["requests far out of time order; taken where they stand"] += 1
        return max(time, last)


def _first_time(file: Path, field: str | None) -> float:
    """The time of a file's first request; before all others where it has none, so that what is wrong is told early."""
    scout = LogReader(file, field=field)
    try:
        with closing(scout._file_requests(str(file), None)) as requests:
            first = next(requests, None)
    except (TraceError, OSError):
        first = None
    return -inf if first is None or first.timestamp is None else first.timestamp


def _sniff(path: str, head: bytes) -> str:
    """`json lines`, `json document` or `server log`, from a file's first bytes.

    Raises:
        TraceError: the file is empty, binary, or a table of lengths.
    """
    head = head.removeprefix(b"\xef\xbb\xbf")
    if not head.strip():
        raise TraceError(f"{path} is empty")
    for magic, name in _BINARY_MAGICS.items():
        if head.startswith(magic):
            raise TraceError(f"{path} is {name}")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise TraceError(f"{path} is UTF-16: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
    if b"\0" in head[:4096]:
        raise TraceError(f"{path} is binary, not a request log (JSON lines, gz and zst are read)")
    start = head.lstrip()
    first = start.split(b"\n", 1)[0].rstrip(b"\r")
    if _SERVER_LOG.search(head) and start[:1] != b"{":
        return "server log"
    if start[:1] not in (b"{", b"["):
        _refuse_length_table(path, first)
        return "json lines"
    try:
        msgspec.json.decode(first)
    except RecursionError:
        return "json lines"
    except msgspec.DecodeError:
        complete = b"\n" in start
        return "json document" if complete and len(first) < 4096 and _opens_document(first) else "json lines"
    return "json document" if start[:1] == b"[" else "json lines"


def _opens_document(first: bytes) -> bool:
    """Whether a line that is not JSON by itself can be the first of a document spread over lines."""
    return first.strip() in (b"{", b"[") or first.rstrip().endswith((b",", b"{", b"[", b":"))


def _refuse_length_table(path: str, header: bytes) -> None:
    text = header.decode(errors="replace").lower()
    if "," in text and any(
        name in text for name in ("contexttokens", "request tokens", "input_length", "prompt_tokens")
    ):
        raise LengthsOnlyError(path, header.decode(errors="replace").strip())
