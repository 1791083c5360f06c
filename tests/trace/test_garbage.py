"""Logs as they come: broken, cut off, out of order, absurd. Each is read as far as it goes, or refused with reason."""

from __future__ import annotations

import gzip
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import zstandard
from click.testing import CliRunner

from caudex.cli.analyze import command
from caudex.trace.errors import TraceError
from caudex.trace.reader import LogReader

GOOD = json.dumps({"prompt": "Once upon a time there was a cache.", "timestamp": 1772359200})


def read(path: Path, **options: Any) -> tuple[int, LogReader]:
    reader = LogReader(path, **options)
    return sum(1 for _ in reader), reader


def log_of(tmp_path: Path, data: str | bytes) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (random.Random(1).randbytes(5000), "binary|could not be read"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, "binary"),
        (b"", "empty"),
        (b"   \n\n", "empty"),
        (gzip.compress(b""), "empty"),
        (b"SQLite format 3\0" + b"\0" * 50, "SQLite"),
        (b"hello\nthere\n", "could not be read"),
        (b'{"a": 1}\n', "could not be read"),
        (b"[]\n", "no request"),
        (b"{}\n" * 10, "could not be read"),
    ],
)
def test_what_is_no_log_is_refused_with_a_reason(data: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=reason):
        read(log_of(tmp_path, data))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(TraceError, match="does not exist"):
        read(Path("no/such/file"))


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    count, reader = read(log_of(tmp_path, b"\xef\xbb\xbf" + f"{GOOD}\r\n{GOOD}\r\n\r\n".encode()))
    assert (count, reader.report.bad_lines) == (2, 0)


def test_a_gzip_that_breaks_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    rng = random.Random(2)
    lines = "".join(json.dumps({"prompt": f"{rng.random()} " * 40}) + "\n" for _ in range(4000)).encode()
    whole = gzip.compress(lines)
    count, reader = read(log_of(tmp_path, whole[: len(whole) // 2]))
    assert 1000 < count < 4000
    assert reader.report.bad_lines == 1
    assert "breaks off" in reader.report.bad_examples[-1][1]


def test_a_line_too_long_to_be_a_request_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caudex.trace.lines.MAX_LINE_BYTES", 1 << 20)
    giant = '{"prompt": "' + "x" * (3 << 20) + '"}'
    count, reader = read(log_of(tmp_path, "\n".join([*[GOOD] * 30, giant, *[GOOD] * 30]) + "\n"))
    assert (count, reader.report.bad_lines) == (60, 1)
    assert reader.report.bad_examples[0][0] == 31


def test_bad_lines_are_counted_shown_and_skipped(tmp_path: Path) -> None:
    lines = [GOOD] * 100
    lines[10], lines[20], lines[30], lines[40] = "{", '{"prompt": 3}', "null", '{"messages": [{"content": "x"}]}'
    count, reader = read(log_of(tmp_path, "\n".join(lines)))
    assert count == 96
    assert reader.report.bad_lines == 4
    assert [line for line, _ in reader.report.bad_examples] == [11, 21, 31]
    assert reader.report.lines == reader.report.requests + reader.report.bad_lines


def test_more_than_five_percent_bad_stops(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"10 of 100 lines could not be read, more than 5 %"):
        read(log_of(tmp_path, "\n".join([GOOD] * 90 + ["{"] * 10)))


@pytest.mark.parametrize(
    "change",
    [
        {"input_length": -5},
        {"output_length": -1},
        {"input_length": 10**30},
        {"input_length": "many"},
        {"hash_ids": "12"},
        {"hash_ids": [1.5]},
        {"hash_ids": None},
        {"block_size": -16},
    ],
)
def test_absurd_hash_lines_are_bad_lines(change: dict[str, Any], tmp_path: Path) -> None:
    good = {"timestamp": 1, "input_length": 32, "output_length": 1, "hash_ids": [1, 2], "block_size": 16}
    lines = [json.dumps(good)] * 40 + [json.dumps({**good, **change})]
    count, reader = read(log_of(tmp_path, "\n".join(lines)))
    assert (count, reader.report.bad_lines) == (40, 1)


@pytest.mark.parametrize("length", [-3, 10**30])
def test_absurd_lengths_are_told_by_the_name_that_they_have(length: int, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=f"output_length is {length}"):
        read(log_of(tmp_path, json.dumps({"prompt": "Once upon a time", "output_length": length})))


def test_an_empty_prompt_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="its 'prompt' is empty"):
        read(log_of(tmp_path, json.dumps({"prompt": ""})))


def test_nulls_duplicate_ids_and_missing_times_are_noted(tmp_path: Path) -> None:
    odd = {"prompt": "x", "request_id": "same", "timestamp": None, "session_id": None, "model": None}
    count, reader = read(log_of(tmp_path, "\n".join([json.dumps(odd)] * 3)))
    assert count == 3
    assert sum(n for message, n in reader.report.warnings.items() if "id occurred before" in message) == 2
    assert sum(n for message, n in reader.report.warnings.items() if "without a time" in message) == 3


def test_times_slightly_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    times = list(range(1000, 1300))
    for start in range(0, 300, 10):
        times[start : start + 10] = times[start : start + 10][::-1]
    reader = LogReader(log_of(tmp_path, "\n".join(json.dumps({"prompt": "x", "timestamp": t}) for t in times)))
    assert [request.timestamp for request in reader] == sorted(map(float, times))


def test_hash_ids_that_do_not_fit_their_length_are_noted(tmp_path: Path) -> None:
    lines = [{"timestamp": 1, "input_length": n, "hash_ids": [1, 2], "block_size": 16} for n in (32, 500, 3)]
    count, reader = read(log_of(tmp_path, "\n".join(map(json.dumps, lines))))
    assert count == 3
    assert sorted(reader.report.warnings.values()) == [1, 1]


COMPRESSED = {"gz": gzip.compress, "zst": lambda data: zstandard.ZstdCompressor().compress(data)}


@pytest.mark.parametrize("kind", COMPRESSED)
def test_bytes_behind_a_compressed_log_are_told_and_cost_nothing(kind: str, tmp_path: Path) -> None:
    data = COMPRESSED[kind](f"{GOOD}\n".encode() * 40)
    count, reader = read(log_of(tmp_path, data + b"garbage"))
    assert (count, reader.report.bad_lines) == (40, 1)
    assert "followed by bytes" in reader.report.bad_examples[0][1]


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_frames_one_after_another_are_one_log(kind: str, tmp_path: Path) -> None:
    frame = COMPRESSED[kind](f"{GOOD}\n".encode() * 3)
    count, reader = read(log_of(tmp_path, frame * 5))
    assert (count, reader.report.bad_lines) == (15, 0)


def test_utf_16_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="UTF-16"):
        read(log_of(tmp_path, GOOD.encode("utf-16")))


def test_hashes_among_text_are_bad_lines(tmp_path: Path) -> None:
    hashes = json.dumps({"hash_ids": [1, 2], "input_length": 1024})
    count, reader = read(log_of(tmp_path, f"{GOOD}\n" * 40 + f"{hashes}\n"))
    assert (count, reader.report.bad_lines) == (40, 1)
    with pytest.raises(TraceError, match="one or the other"):
        read(log_of(tmp_path, f"{hashes}\n{GOOD}\n"))


@pytest.mark.parametrize("token", [-5, 2**40, 2**70])
def test_numbers_that_are_no_token_ids_are_bad_lines(token: int, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no token id"):
        read(log_of(tmp_path, json.dumps({"prompt_token_ids": [1, 2, token]})))


def test_json_nested_without_end_is_a_bad_line(tmp_path: Path) -> None:
    count, reader = read(log_of(tmp_path, f"{GOOD}\n" * 40 + '{"a":' * 5000 + "1" + "}" * 5000))
    assert (count, reader.report.bad_lines) == (40, 1)
    with pytest.raises(TraceError, match="recursion"):
        read(log_of(tmp_path, '{"a":' * 5000 + "1" + "}" * 5000 + "\n"))


def test_a_pipe_is_a_log_too(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(f"{GOOD}\n" * 20))
    writer.start()
    count, _ = read(pipe)
    writer.join()
    assert count == 20


GARBAGE = {
    "binary": b"\x7fELF\0\0" + bytes(range(256)),
    "words": b"no log at all\n",
    "cut.gz": gzip.compress(f"{GOOD}\n".encode() * 2000)[:60],
    "deep": b'{"a":' * 5000 + b"}" * 5000,
    "lengths.csv": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,374,44\n",
    "broken.parquet": b"PAR1" + b"x" * 64,
    "empty": b"",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_the_command_refuses_garbage_in_one_line(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(GARBAGE[name])
    result = CliRunner().invoke(command, [str(file)])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_page_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    log = log_of(tmp_path, f"{GOOD}\n" * 3)
    result = CliRunner().invoke(command, [str(log), "--html", str(tmp_path / "no" / "page.html")])
    assert result.exit_code == 1
    assert "No such file" in result.stderr
