"""The one internal form of a log: Arrow tables of requests, with their tokens or block ids as list columns.

A log is read, rendered and tokenised in batches; Parquet files of the same schema are the form it is kept and passed
on in. What a batch holds is said once, in the schema's metadata (`TraceInfo`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from caudex._core import DistinctIds
from caudex.trace.chain import prefix_hashes, seed_of
from caudex.trace.encode import PromptEncoder, in_batches
from caudex.trace.errors import TraceError
from caudex.trace.request import Request

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise ModuleNotFoundError(
        "logs are kept in Arrow tables: pip install 'caudex[analyze]'", name=error.name
    ) from error

TRACE_VERSION = 1
METADATA_KEY = b"caudex.trace"
MAX_BATCH_IDS = 1 << 18


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """What the columns of a trace mean.

    `kind` "tokens": `token_ids` holds the prompt's tokens. "blocks": `block_ids` holds prefix-chained ids of blocks of
    `block_size` tokens, of which those within `input_length` are full.
    """

    kind: Literal["tokens", "blocks"]
    block_size: int | None = None
    tokenizer: str | None = None
    template: str | None = None
    source: str | None = None
    version: int = TRACE_VERSION


def schema_of(info: TraceInfo) -> Any:
    prompt = (
        pa.field("token_ids", pa.large_list(pa.int32()))
        if info.kind == "tokens"
        else pa.field("block_ids", pa.large_list(pa.int64()))
    )
    fields = [
        pa.field("request_id", pa.string()),
        pa.field("timestamp", pa.float64()),
        pa.field("session", pa.string()),
        pa.field("tenant", pa.string()),
        pa.field("model", pa.string()),
        pa.field("lora", pa.string()),
        pa.field("salt", pa.string()),
        pa.field("replica", pa.string()),
        pa.field("input_length", pa.int64(), nullable=False),
        pa.field("output_length", pa.int64()),
        prompt,
    ]
    return pa.schema(fields, metadata={METADATA_KEY: msgspec.json.encode(asdict(info))})


def info_of(schema: Any, source: str = "the table") -> TraceInfo:
    """What a table says about itself. Raises TraceError where it is no Caudex trace of a version known here."""
    raw = (schema.metadata or {}).get(METADATA_KEY)
    if raw is None:
        raise TraceError(f"{source} is Parquet but no Caudex trace; `caudex trace convert` writes one")
    info = TraceInfo(**msgspec.json.decode(raw))
    if info.version > TRACE_VERSION:
        raise TraceError(f"{source} is a trace of version {info.version}; this Caudex reads up to {TRACE_VERSION}")
    return info


_TEXT_COLUMNS = ("request_id", "session", "tenant", "model", "lora", "salt", "replica")


def token_batches(requests: Iterable[Request], encoder: PromptEncoder, schema: Any) -> Iterator[Any]:
    """Requests as record batches of tokens."""
    for batch in in_batches(requests):
        arrays = encoder.encode(batch)
        lengths = [len(array) for array in arrays]
        yield _record_batch(batch, lengths, _list_array(arrays, np.dtype(np.int32)), schema)


def block_batches(
    requests: Iterable[Request], schema: Any, block_size: int, warnings: Counter[str] | None = None
) -> Iterator[Any]:
    """Requests of a hash trace as record batches of block ids, chained anew.

    Ids are chained here whatever the trace claims, so that an id can never match after another parent, and requests of
    other models, adapters or salts never match at all.
    """
    seen = DistinctIds()
    for batch in in_batches(requests, 256, MAX_BATCH_IDS):
        paths = [_checked_ids(request, block_size) for request in batch]
        given = _list_array(paths, np.dtype(np.int64))
        seen.add(given.values.to_numpy(), given.offsets.to_numpy())
        chained = [prefix_hashes(path, seed_of(*request.namespace)) for request, path in zip(batch, paths, strict=True)]
        lengths = [request.input_length or 0 for request in batch]
        yield _record_batch(batch, lengths, _list_array(chained, np.dtype(np.int64)), schema)
    places = seen.num_blocks - seen.num_ids
    if warnings is not None and places:
        warnings["hash ids occur after different parents; each place is taken for a block of its own"] = places


def _checked_ids(request: Request, block_size: int) -> Any:
    if request.hash_ids is None:
        raise TraceError(f"line {request.line} has no hash_ids, and earlier lines have; a log is one or the other")
    if request.block_size != block_size:
        raise TraceError(
            f"line {request.line} has blocks of {request.block_size} tokens, earlier lines of {block_size}; "
            "split the log by block size"
        )
    return _as_int64(request.hash_ids)


def _as_int64(ids: Sequence[int]) -> Any:
    """Ids of any size and sign as 64-bit ones; larger ones lose their high bits."""
    try:
        return np.asarray(ids, dtype=np.int64)
    except OverflowError:
        return np.asarray([(item & (2**64 - 1)) for item in ids], dtype=np.uint64).view(np.int64)


def _record_batch(batch: list[Request], lengths: list[int], prompts: Any, schema: Any) -> Any:
    columns = {name: pa.array([getattr(request, name) for request in batch], pa.string()) for name in _TEXT_COLUMNS}
    columns["timestamp"] = pa.array([request.timestamp for request in batch], pa.float64())
    columns["input_length"] = pa.array(lengths, pa.int64())
    columns["output_length"] = pa.array([request.output_length for request in batch], pa.int64())
    columns[schema.names[-1]] = prompts
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def _list_array(arrays: list[Any], dtype: np.dtype[Any]) -> Any:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    values = np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values.astype(dtype, copy=False)))


def write_parquet(path: str | Path, batches: Iterable[Any], schema: Any) -> int:
    """Writes batches as they come; returns the number of requests. A broken-off write leaves no file behind."""
    part = Path(f"{path}.part")
    rows = 0
    try:
        with pq.ParquetWriter(part, schema, compression="zstd") as writer:
            for batch in batches:
                writer.write_batch(batch)
                rows += batch.num_rows
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
    return rows


def is_parquet(path: str) -> bool:
    if path == "-" or not Path(path).is_file():
        return False
    with Path(path).open("rb") as file:
        return file.read(4) == b"PAR1"


def read_parquet(path: str, batch_size: int = 256) -> tuple[TraceInfo, Any, Iterator[Any]]:
    """A trace's info, schema and batches. Raises TraceError where the file is broken or no trace."""
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise TraceError(f"{path} is broken Parquet: {error}") from None
    return info_of(file.schema_arrow, path), file.schema_arrow, file.iter_batches(batch_size)


def first_and_rest(requests: Iterable[Request]) -> tuple[Request, Iterator[Request]]:
    """The first request, and all of them including it. Raises TraceError where there is none."""
    iterator = iter(requests)
    try:
        first = next(iterator)
    except StopIteration:
        raise TraceError("the log holds no request") from None
    return first, chain([first], iterator)
