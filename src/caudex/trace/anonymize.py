"""A log that can leave the building: prefix structure, lengths and times, and nothing of what was said or by whom."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np

from caudex.trace.chain import Int64Array, every_block, prefix_hashes, seed_of
from caudex.trace.table import TraceInfo, schema_of

try:
    import pyarrow as pa
except ImportError as error:
    raise ImportError("anonymising needs pyarrow: pip install 'caudex[analyze]'") from error

_NAMES = ("request_id", "session", "tenant", "model", "lora", "salt", "replica")


class Anonymizer:
    """Replaces every name and every block by a keyed hash. Equal stays equal and different stays different, so all
    that is said about prefixes stays true; without the key nothing can be tried against the hashes, since a block's id
    is an HMAC of all tokens up to its end. The key is drawn anew unless one is given, and is never written.

    Blocks are `block_size` tokens: what is shared inside a block is not kept. Times become seconds since the first
    request.
    """

    def __init__(self, info: TraceInfo, block_size: int, key: bytes | None = None) -> None:
        self._info = info
        self._key = key or secrets.token_bytes(32)
        self._block_size = info.block_size or block_size
        self._start: float | None = None
        self._names: dict[tuple[str, str], str] = {}
        self.info = TraceInfo("blocks", block_size=self._block_size, source="anonymized")
        self.schema = schema_of(self.info)

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            columns = {name: batch.column(name).to_pylist() for name in batch.schema.names[:-1]}
            prompts = batch.column(batch.schema.names[-1])
            values, offsets = prompts.values.to_numpy(), prompts.offsets.to_numpy()
            paths = [
                self._blocks(values[offsets[row] : offsets[row + 1]], columns, row) for row in range(batch.num_rows)
            ]
            yield self._record_batch(columns, paths)

    def _blocks(self, prompt: Any, columns: dict[str, list[Any]], row: int) -> Int64Array:
        if self._info.kind == "blocks":
            hashes = np.asarray(prompt, dtype=np.int64)
        else:
            names = (columns[name][row] or "" for name in ("model", "lora", "salt"))
            hashes = every_block(prefix_hashes(prompt, seed_of(*names)), self._block_size)
        return self._keyed(hashes)

    def _keyed(self, ids: Int64Array) -> Int64Array:
        """HMAC-SHA256 of each id, cut to 64 bits."""
        digests = b"".join(hmac.digest(self._key, id_.tobytes(), hashlib.sha256)[:8] for id_ in ids)
        return np.frombuffer(digests, dtype=np.int64)

    def _name(self, column: str, value: str | None) -> str | None:
        if value is None:
            return None
        known = self._names.get((column, value))
        if known is None:
            digest = hmac.digest(self._key, f"{column}\0{value}".encode(), hashlib.sha256)
            known = self._names[column, value] = digest[:8].hex()
        return known

    def _record_batch(self, columns: dict[str, list[Any]], paths: list[Int64Array]) -> Any:
        times = columns["timestamp"]
        if self._start is None:
            self._start = next((time for time in times if time is not None), None)
        start = self._start or 0.0
        arrays: dict[str, Any] = {
            name: pa.array([self._name(name, value) for value in columns[name]], pa.string()) for name in _NAMES
        }
        arrays["timestamp"] = pa.array([None if time is None else time - start for time in times], pa.float64())
        arrays["input_length"] = pa.array(columns["input_length"], pa.int64())
        arrays["output_length"] = pa.array(columns["output_length"], pa.int64())
        offsets = np.concatenate([[0], np.cumsum([len(path) for path in paths])]).astype(np.int64)
        blocks = np.concatenate(paths) if paths else np.zeros(0, dtype=np.int64)
        arrays["block_ids"] = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(blocks))
        return pa.record_batch([arrays[name] for name in self.schema.names], schema=self.schema)
