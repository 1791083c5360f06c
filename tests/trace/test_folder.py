"""Several files as one log: in the order of time, and going on where a file cannot be read."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest
from click.testing import CliRunner

from caudex.cli import main
from caudex.trace.errors import TraceError
from caudex.trace.folder import merged_by_time
from caudex.trace.reader import LogReader
from caudex.trace.request import Request


def lines(*times: float) -> bytes:
    return "".join(json.dumps({"prompt": f"Once upon {time}", "timestamp": time}) + "\n" for time in times).encode()


def broken_folder(path: Path) -> Path:
    """60 good requests in two files, and three files that cannot be read."""
    (path / "sub").mkdir(parents=True)
    (path / "a.jsonl").write_bytes(lines(*range(1000, 1060, 2)))
    (path / "sub" / "b.jsonl.gz").write_bytes(gzip.compress(lines(*range(1001, 1061, 2))))
    (path / "gone.jsonl").symlink_to(path / "nowhere")
    (path / "dump.pkl").write_bytes(pickle.dumps({"requests": []}))
    (path / "cut.jsonl.gz").write_bytes(gzip.compress(lines(*range(50)))[:40])
    (path / ".hidden").write_bytes(b"\0" * 100)
    return path


def test_files_that_cannot_be_read_are_counted_named_and_skipped(tmp_path: Path) -> None:
    folder = broken_folder(tmp_path / "logs")
    reader = LogReader(folder)
    assert [request.timestamp for request in reader] == list(map(float, range(1000, 1060)))
    reasons = dict(reader.report.bad_files)
    assert reasons.keys() == {"gone.jsonl", "dump.pkl", "cut.jsonl.gz"}
    assert reasons["gone.jsonl"] == "does not exist"
    assert "--log-requests-format json" in reasons["dump.pkl"]
    assert reader.report.bad_lines == 3
    assert reader.report.lines == reader.report.requests + reader.report.bad_lines


def test_the_command_names_the_files_that_it_skipped(tmp_path: Path) -> None:
    folder = broken_folder(tmp_path / "logs")
    report = tmp_path / "report.json"
    result = CliRunner().invoke(main, ["analyze", str(folder), "--no-breakers", "--json", str(report)])
    assert result.exit_code == 0, result.output
    assert "dump.pkl skipped: " in result.output
    read = json.loads(report.read_text())["read"]
    assert {name for name, _ in read["bad_files"]} == {"gone.jsonl", "dump.pkl", "cut.jsonl.gz"}


def test_a_folder_of_nothing_readable_is_refused_with_the_reasons(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0" * 100)
    (tmp_path / "b.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n")
    with pytest.raises(TraceError, match=r"a\.bin: is binary.*b\.csv: holds lengths only"):
        list(LogReader(tmp_path))


def test_bad_lines_are_told_with_their_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(*range(1000, 1050)))
    (tmp_path / "b.jsonl").write_bytes(lines(1100) + b"{\n")
    reader = LogReader(tmp_path)
    assert sum(1 for _ in reader) == 51
    ((line, reason),) = reader.report.bad_examples
    assert line == 2
    assert reason.startswith("b.jsonl: not JSON")


def test_files_that_follow_each_other_are_never_open_at_once() -> None:
    opened: list[str] = []
    done: list[str] = []

    def of_file(name: str, *times: float):  # type: ignore[no-untyped-def]
        def requests():  # type: ignore[no-untyped-def]
            opened.append(name)
            assert len(opened) - len(done) == 1
            yield from (Request(line=1, timestamp=time) for time in times)
            done.append(name)

        return times[0], requests

    files = [of_file("late", 20.0, 21.0), of_file("early", 0.0, 9.0), of_file("middle", 10.0, 19.0)]
    assert [request.timestamp for request in merged_by_time(files)] == [0.0, 9.0, 10.0, 19.0, 20.0, 21.0]
    assert opened == ["early", "middle", "late"]


def test_progress_over_a_folder_ends_at_its_size(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_bytes(lines(*range(30)))
    seen: list[tuple[int, int]] = []
    list(LogReader(tmp_path, progress=lambda done, total: seen.append((done, total))))
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (size, size)
