"""Opens a log of any kind and gives its requests as Arrow batches."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from caudex.trace.encode import PromptEncoder
from caudex.trace.lines import Progress
from caudex.trace.reader import LogReader, ReadReport
from caudex.trace.render import RequestRenderer
from caudex.trace.request import Request
from caudex.trace.table import (
    TraceInfo,
    block_batches,
    first_and_rest,
    is_parquet,
    read_parquet,
    schema_of,
    token_batches,
)
from caudex.trace.tokenizer import BytesTokenizer, Tokenizer, load_tokenizer


@dataclass(slots=True)
class Log:
    """An opened log. `batches` can be gone through once; `report` is complete when they are.

    `info.tokenizer` and `info.template` say what turned text into tokens; the template's final word, how many requests
    the assumed one had to stand in for, is `template_description()` after the last batch.
    """

    info: TraceInfo
    schema: Any
    batches: Iterator[Any]
    report: ReadReport
    encoder: PromptEncoder | None = None
    has_text: bool = False

    def template_description(self) -> str | None:
        if self.encoder is None or self.encoder.renderer.rendered == 0:
            return self.info.template
        return self.encoder.renderer.description

    @property
    def reader(self) -> Tokenizer | None:
        """The tokenizer that the log's tokens are of, which shows them as text; None where it is not known."""
        if self.encoder is None:
            return None
        tokenizer = self.encoder.tokenizer
        known = self.has_text or tokenizer.name != BytesTokenizer.name or self.info.tokenizer == tokenizer.description
        return tokenizer if known else None


def open_log(
    path: str | Path,
    *,
    tokenizer: str | None = None,
    chat_template: str | Path | None = None,
    field: str | None = None,
    block_size: int | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
    on_request: Callable[[Request], None] | None = None,
) -> Log:
    """Opens a request log, hash trace or Parquet trace (see `LogReader` for the formats).

    Args:
        tokenizer: a folder, tokenizer.json, hub id, tiktoken name, or `bytes` (the default). Of a log of token ids, the
            one that they are of, to show them as text.
        chat_template: a Jinja file to use instead of the tokenizer's own template.
        block_size: tokens a hash id stands for, where the trace does not say.
        on_request: called with each request that has text or tokens, before it is tokenised.

    Raises:
        TraceError: it cannot be read, or says nothing about prefixes; the message says why.
    """
    if is_parquet(str(path)):
        return _open_parquet(str(path), tokenizer, limit, on_request)
    reader = LogReader(path, field=field, block_size=block_size, limit=limit, progress=progress)
    first, requests = first_and_rest(reader)
    if first.hash_ids is not None:
        size = first.block_size or block_size or 0
        info = TraceInfo("blocks", block_size=size, source=reader.report.format)
        schema = schema_of(info)
        return Log(info, schema, block_batches(requests, schema, size, reader.report.warnings), reader.report)
    loaded, template = load_tokenizer(tokenizer or "bytes", chat_template)
    encoder = PromptEncoder(loaded, RequestRenderer(template))
    has_text = first.token_ids is None
    info = TraceInfo(
        "tokens",
        tokenizer=loaded.description if has_text else "token ids as logged",
        template=encoder.renderer.description if first.messages is not None else None,
        source=reader.report.format,
    )
    schema = schema_of(info)
    if on_request is not None:
        requests = _seen_by(on_request, requests)
    return Log(info, schema, token_batches(requests, encoder, schema), reader.report, encoder, has_text)


def _seen_by(on_request: Callable[[Request], None], requests: Iterable[Request]) -> Iterator[Request]:
    for request in requests:
        on_request(request)
        yield request


def _open_parquet(
    path: str, tokenizer: str | None, limit: int | None, on_request: Callable[[Request], None] | None
) -> Log:
    info, schema, batches = read_parquet(path)
    report = ReadReport(path, format="caudex trace")
    batches = _counted(batches, report, limit)
    if info.kind == "blocks":
        return Log(info, schema, batches, report)
    if on_request is not None:
        batches = _rows_seen_by(on_request, batches)
    encoder = PromptEncoder(load_tokenizer(tokenizer or "bytes", None)[0], RequestRenderer())
    return Log(info, schema, batches, report, encoder)


def _rows_seen_by(on_request: Callable[[Request], None], batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of a trace of token ids, each of whose rows is first shown as a request."""
    line = 0
    for batch in batches:
        ids = batch.column("token_ids")
        values, ends = ids.values.to_numpy(), ids.offsets.to_numpy()
        rows = batch.select(_AROUND).to_pylist()
        for row, start, end in zip(rows, ends, ends[1:], strict=False):
            line += 1
            on_request(Request(line, **row, token_ids=array("i", values[start:end].astype(np.intc).tobytes())))
        yield batch


_AROUND = [field.name for field in schema_of(TraceInfo("tokens")) if field.name != "token_ids"]


def _counted(batches: Iterator[Any], report: ReadReport, limit: int | None) -> Iterator[Any]:
    for batch in batches:
        left = batch.num_rows if limit is None else min(batch.num_rows, limit - report.requests)
        if left <= 0:
            return
        report.requests += left
        report.lines += left
        yield batch.slice(0, left)
