"""One pass over a log's batches: what each request could have had from a cache that never evicts.

prompt:  | also at block granularity | to the token |            computed            |
         |<------- hit_tokens ------>|
         |<------------- exact_tokens ------------->|
         |<-- in_session_tokens ->|                      (what its own session's earlier prompts give)
         |<--------------- with_output_tokens -------------->|   (if generated tokens are cached too)
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from caudex.analysis.replay import reusable_blocks
from caudex.cache.block_trace import BlockTrace
from caudex.cache.trace_builder import TraceBuilder
from caudex.trace.chain import Int64Array
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
    """Takes batches, gives `Measured`. Memory is bounded by what is distinct in the log: what TraceBuilder keeps of it,
    and about 150 bytes a request."""

    def __init__(
        self, info: TraceInfo, block_size: int, turn_ends: list[npt.NDArray[np.int32]], *, ragged_tokens: int = 0
    ) -> None:
        """`ragged_tokens`: how many at a prompt's end are others when text follows them, for want of a vocabulary."""
        self._info = info
        self._ragged_tokens = ragged_tokens
        self.block_size = block_size
        self._turn_ends = turn_ends
        self._builder = TraceBuilder(info.kind, (info.block_size or 1) if info.kind == "blocks" else 1)
        self._known: list[Int64Array] = []
        self._timestamps: list[npt.NDArray[np.float64]] = []
        self._outputs: list[Int64Array] = []
        self._with_output = array("q")
        self._names: dict[str, list[str | None]] = {name: [] for name in _NAMES}
        self._interned: dict[str, str] = {}
        self._last_of_session: dict[str, tuple[int, int | None]] = {}

    def add(self, batch: Any) -> None:
        """Takes one record batch of the trace's schema."""
        columns = {name: batch.column(name).to_pylist() for name in _COLUMNS}
        prompts = batch.column(batch.schema.names[-1])
        values, offsets = prompts.values.to_numpy(), prompts.offsets.to_numpy()
        namespaces = None  # ids of blocks are chained from their namespace on
        if self._info.kind == "tokens":
            names = (columns[name] for name in ("model", "lora", "salt"))
            namespaces = [tuple(name or "" for name in row) for row in zip(*names, strict=True)]
        known = self._builder.add(values, offsets, columns["input_length"], namespaces)
        self._known.append(known)
        self._timestamps.append(np.asarray(columns["timestamp"], dtype=np.float64))  # None becomes NaN
        self._outputs.append(batch.column("output_length").fill_null(-1).to_numpy())
        for name, kept in self._names.items():
            kept += [None if value is None else self._interned.setdefault(value, value) for value in columns[name]]
        for row, session in enumerate(columns["session"]):
            prompt = values[offsets[row] : offsets[row + 1]]
            length, output = columns["input_length"][row], columns["output_length"][row]
            self._with_output.append(self._served_with_output(prompt, session, int(known[row]), length, output))

    def _served_with_output(
        self, prompt: Any, session: str | None, known: int, length: int, output_length: int | None
    ) -> int:
        """What is served if the output of the session's request before is cached: this prompt repeats that prompt and
        then its output, up to the end of the turn (or for as long as the log says the output was)."""
        end = known
        if session is not None:
            before = self._last_of_session.get(session)
            if before is not None:
                last_length, last_output = before
                reached = known >= last_length // self._builder.unit * self._builder.unit - self._ragged_tokens
                if reached and length > last_length:
                    end = max(end, last_length + self._output_tokens(prompt, last_length, last_output))
            self._last_of_session[self._interned[session]] = (length, output_length)
        most = reusable_blocks(length, self.block_size)
        return min(min(end, length) // self.block_size, most) * self.block_size

    def _output_tokens(self, prompt: Any, start: int, logged: int | None) -> int:
        if logged is not None:
            return logged
        if self._info.kind == "blocks":
            return 0
        tail = prompt[start : start + _TURN_SEARCH_TOKENS]
        return max((_first_match(tail, end) for end in self._turn_ends), default=0)

    def measured(self) -> Measured:
        """What the batches so far amount to."""
        known = np.concatenate([np.zeros(0, dtype=np.int64), *self._known])
        timestamps = np.concatenate([np.zeros(0), *self._timestamps])
        outputs = np.concatenate([np.zeros(0, dtype=np.int64), *self._outputs])
        trace = self._builder.build(
            self.block_size,
            timestamps=timestamps if len(timestamps) and np.isfinite(timestamps).all() else None,
            output_lengths=outputs if np.all(outputs >= 0) else None,
            sessions=_coded(self._names["session"]),
            tenants=_coded(self._names["tenant"]),
        )
        hit_blocks = np.minimum(known // self.block_size, trace.num_reusable_blocks)
        none = np.zeros(len(trace), dtype=np.int64)
        in_session = none if trace.sessions is None else trace.reuse_within(trace.sessions)
        return Measured(
            trace=trace,
            hit_tokens=hit_blocks * self.block_size,
            exact_tokens=np.minimum(known, np.maximum(trace.input_lengths - 1, 0)),
            in_session_tokens=in_session * self.block_size,
            with_output_tokens=np.asarray(self._with_output, dtype=np.int64),
            sessions=self._names["session"],
            tenants=self._names["tenant"],
            models=self._names["model"],
            replicas=self._names["replica"],
            timestamps=timestamps,
            distinct_tokens=self._builder.num_distinct_tokens,
        )


_NAMES = ("session", "tenant", "model", "replica")
_COLUMNS = ("timestamp", *_NAMES, "lora", "salt", "input_length", "output_length")


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
    if trace.timestamps is None:
        return 0
    done = trace.timestamps + (trace.input_lengths - measured.hit_tokens) / prefill_rate
    return trace.blocks_in_flight(done, measured.hit_tokens // trace.block_size) * trace.block_size
