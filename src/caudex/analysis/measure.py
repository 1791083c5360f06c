"""One pass over a log's batches: what each request could have had from a cache that never evicts.

prompt:  | also at block granularity | to the token |            computed            |
         |<------- hit_tokens ------>|
         |<------------- exact_tokens ------------->|
         |<-- in_session_tokens ->|                      (what its own session's earlier prompts give)
         |<--------------- with_output_tokens -------------->|   (if generated tokens are cached too)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from caudex.analysis.prefix_set import PrefixSet
from caudex.analysis.replay import reusable_blocks
from caudex.cache.block_trace import BlockTrace
from caudex.trace.chain import Int64Array, every_block, prefix_hashes, seed_of
from caudex.trace.table import TraceInfo

_TURN_SEARCH_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True)
class Measured:
    """Arrays of (requests,), and the log as the block trace that the caches replay."""

    trace: BlockTrace
    hit_tokens: Int64Array
    exact_tokens: Int64Array
    in_session_tokens: Int64Array
    with_output_tokens: Int64Array
    sessions: list[str | None]
    tenants: list[str | None]
    models: list[str | None]
    replicas: list[str | None]
    timestamps: npt.NDArray[np.float64]
    """Seconds; NaN where the log has none."""
    distinct_tokens: int

    @property
    def lengths(self) -> Int64Array:
        return self.trace.input_lengths

    @property
    def prompt_tokens(self) -> int:
        return int(self.lengths.sum())

    def rate(self, tokens: Int64Array) -> float:
        return float(tokens.sum()) / max(self.prompt_tokens, 1)


class Meter:
    """Takes batches, gives `Measured`. Memory: 8 bytes a block of the log, 8 a distinct token (16 a distinct block),
    a few hundred a request."""

    def __init__(self, info: TraceInfo, block_size: int, turn_ends: list[npt.NDArray[np.int32]]) -> None:
        self._info = info
        self.block_size = block_size
        self._unit = info.block_size if info.kind == "blocks" and info.block_size else 1
        self._turn_ends = turn_ends
        self._seen = PrefixSet()
        self._seen_in_session = PrefixSet()
        self._blocks: list[Int64Array] = []
        self._rows: dict[str, list[Any]] = {name: [] for name in _ROW_NAMES}
        self._last_of_session: dict[str, tuple[int, int, int | None]] = {}

    def add(self, batch: Any) -> None:
        """Takes one record batch of the trace's schema."""
        columns = {name: batch.column(name).to_pylist() for name in _COLUMNS}
        prompts = batch.column(batch.schema.names[-1])
        values, offsets = prompts.values.to_numpy(), prompts.offsets.to_numpy()
        for row in range(batch.num_rows):
            prompt = values[offsets[row] : offsets[row + 1]]
            self._add_request(prompt, {name: column[row] for name, column in columns.items()})

    def _add_request(self, prompt: Any, row: dict[str, Any]) -> None:
        namespace = (row["model"] or "", row["lora"] or "", row["salt"] or "")
        length = int(row["input_length"])
        if self._info.kind == "blocks":
            units = np.asarray(prompt[: length // self._unit], dtype=np.int64)
        else:
            units = prefix_hashes(prompt, seed_of(*namespace))
        known = self._seen.visit(units) * self._unit
        blocks = every_block(units, self.block_size // self._unit)
        in_session = 0
        if row["session"] is not None:
            with np.errstate(over="ignore"):
                own = blocks + np.int64(seed_of("session", row["session"]) >> 1)
            in_session = self._seen_in_session.visit(own)
        most = reusable_blocks(length, self.block_size)
        self._blocks.append(blocks)
        rows = self._rows
        rows["length"].append(length)
        rows["exact"].append(min(known, max(length - 1, 0)))
        rows["hit"].append(min(known // self.block_size, most) * self.block_size)
        rows["in_session"].append(min(in_session, most) * self.block_size)
        rows["with_output"].append(self._with_output(prompt, row, known, most))
        for name in ("session", "tenant", "model", "replica", "output_length"):
            rows[name].append(row[name])
        rows["timestamp"].append(float("nan") if row["timestamp"] is None else row["timestamp"])

    def _with_output(self, prompt: Any, row: dict[str, Any], known: int, most: int) -> int:
        """What is served if the output of the session's request before is cached: this prompt repeats that prompt and
        then its output, up to the end of the turn (or for as long as the log says the output was)."""
        session, length = row["session"], int(row["input_length"])
        end = known
        if session is not None:
            before = self._last_of_session.get(session)
            if before is not None:
                last_length, _, output_length = before
                reached = known >= last_length // self._unit * self._unit
                if reached and length > last_length:
                    end = max(end, last_length + self._output_tokens(prompt, last_length, output_length))
            self._last_of_session[session] = (length, known, row["output_length"])
        return min(min(end, length) // self.block_size, most) * self.block_size

    def _output_tokens(self, prompt: Any, start: int, logged: int | None) -> int:
        if logged is not None:
            return logged
        if self._info.kind == "blocks":
            return 0
        tail = prompt[start : start + _TURN_SEARCH_TOKENS]
        return max((_first_match(tail, end) for end in self._turn_ends), default=0)

    def measured(self) -> Measured:
        rows = self._rows
        lengths = np.asarray(rows["length"], dtype=np.int64)
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum([len(blocks) for blocks in self._blocks], out=offsets[1:])
        ids = np.concatenate(self._blocks) if self._blocks else np.zeros(0, dtype=np.int64)
        self._blocks.clear()
        timestamps = np.asarray(rows["timestamp"], dtype=np.float64)
        outputs = rows["output_length"]
        trace = BlockTrace(
            ids,
            offsets,
            lengths,
            self.block_size,
            timestamps=timestamps if len(timestamps) and np.isfinite(timestamps).all() else None,
            output_lengths=None if None in outputs else np.asarray(outputs, dtype=np.int64),
            sessions=_coded(rows["session"]),
            tenants=_coded(rows["tenant"]),
        )
        return Measured(
            trace=trace,
            hit_tokens=np.asarray(rows["hit"], dtype=np.int64),
            exact_tokens=np.asarray(rows["exact"], dtype=np.int64),
            in_session_tokens=np.asarray(rows["in_session"], dtype=np.int64),
            with_output_tokens=np.asarray(rows["with_output"], dtype=np.int64),
            sessions=rows["session"],
            tenants=rows["tenant"],
            models=rows["model"],
            replicas=rows["replica"],
            timestamps=timestamps,
            distinct_tokens=len(self._seen) * self._unit,
        )


_COLUMNS = ("timestamp", "session", "tenant", "model", "lora", "salt", "replica", "input_length", "output_length")
_ROW_NAMES = (
    "length", "exact", "hit", "in_session", "with_output", "session", "tenant", "model", "replica", "output_length",
    "timestamp",
)  # fmt: skip


def _first_match(tokens: npt.NDArray[np.int32], pattern: npt.NDArray[np.int32]) -> int:
    """Tokens up to and including the first occurrence of `pattern`; 0 where it does not occur."""
    for start in np.flatnonzero(tokens == pattern[0]):
        if np.array_equal(tokens[start : start + len(pattern)], pattern):
            return int(start) + len(pattern)
    return 0


def _coded(names: list[str | None]) -> Int64Array | None:
    """Names as numbers; None stands for each request being its own. None for a log that has no names at all."""
    if all(name is None for name in names):
        return None
    codes: dict[str, int] = {}
    coded = np.empty(len(names), dtype=np.int64)
    for index, name in enumerate(names):
        coded[index] = -1 - index if name is None else codes.setdefault(name, len(codes))
    return coded


def in_flight_tokens(measured: Measured, prefill_rate: float) -> int:
    """Prompt tokens that are computed twice at the same time: served by an infinite cache, but whose first computation
    had not ended when the request came. Prefill is taken to start on arrival and to run at `prefill_rate` tokens/s."""
    trace = measured.trace
    if trace.timestamps is None or not len(trace.block_ids):
        return 0
    _, first, inverse = np.unique(trace.block_ids, return_index=True, return_inverse=True)
    request_of_block = np.repeat(np.arange(len(trace)), np.diff(trace.offsets))
    supplier = request_of_block[first][inverse]
    done = trace.timestamps + (trace.input_lengths - measured.hit_tokens) / prefill_rate
    position = np.arange(len(trace.block_ids)) - np.repeat(trace.offsets[:-1], np.diff(trace.offsets))
    served = position < (measured.hit_tokens // trace.block_size)[request_of_block]
    early = trace.timestamps[request_of_block] < done[supplier]
    return int((served & early & (supplier != request_of_block)).sum()) * trace.block_size
