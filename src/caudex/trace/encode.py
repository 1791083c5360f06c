"""Requests to token arrays: rendering, then tokenising only what has not been seen before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np

from caudex.trace.render import CHATML_MARKERS, RequestRenderer
from caudex.trace.request import Request
from caudex.trace.tokenizer import TokenArray, Tokenizer

MIN_PIECE_CHARS = 2048
PROBED_PROMPTS = 8
DEFAULT_CACHE_BYTES = 96 << 20
BATCH_REQUESTS = 64
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>", "<|return|>", "<|call|>", "</s>")

# Every pre-tokeniser in use ends a word where a newline follows a letter, whatever comes next.
_SAFE_CUT = re.compile(r"(?<=[A-Za-z])(?=\n)")


class PromptEncoder:
    """Encodes prompts piece by piece, with a cache of pieces, so that a growing conversation costs only its new turns.

    A prompt is cut at the tokenizer's markers (special tokens) and, inside long pieces, where a line ends in a letter.
    Whether a tokenizer gives the same ids in pieces as in one go is tried on the first prompts; one that does not is
    run on whole prompts instead. Memory: at most `cache_bytes` of pieces, dropped all at once when full.
    """

    def __init__(
        self, tokenizer: Tokenizer, renderer: RequestRenderer, *, cache_bytes: int = DEFAULT_CACHE_BYTES
    ) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer
        markers = sorted({*tokenizer.markers, *CHATML_MARKERS}, key=len, reverse=True)
        self._markers = re.compile("(" + "|".join(re.escape(marker) for marker in markers) + ")")
        self._cache: dict[str, TokenArray] = {}
        self._cache_bytes = cache_bytes
        self._used_bytes = 0
        self._probes_left = PROBED_PROMPTS
        self._in_pieces = True

    def encode(self, requests: list[Request]) -> list[TokenArray]:
        """The prompt tokens of each request; token ids that were logged are taken as they are."""
        texts = [None if request.token_ids is not None else self.renderer.render(request) for request in requests]
        encoded = iter(self.encode_texts([text for text in texts if text is not None]))
        arrays: list[TokenArray] = []
        for request, text in zip(requests, texts, strict=True):
            if text is None:
                arrays.append(np.asarray(request.token_ids, dtype=np.int32))
            elif request.messages is None:
                arrays.append(np.concatenate([self.tokenizer.prefix, next(encoded)]))
            else:
                arrays.append(next(encoded))
        return arrays

    def encode_texts(self, texts: list[str]) -> list[TokenArray]:
        if self._in_pieces and self._probes_left > 0:
            self._probe(texts[: self._probes_left])
        if not self._in_pieces:
            return self.tokenizer.encode_batch(texts)
        cut = [self._pieces(text) for text in texts]
        self._encode_missing(piece for pieces in cut for piece in pieces)
        return [self._joined(pieces) for pieces in cut]

    def turn_ends(self) -> list[TokenArray]:
        """The token runs that end a turn, in the templates in use: what a model's output ends with."""
        known = {*self.tokenizer.markers, *CHATML_MARKERS}
        return self.tokenizer.encode_batch([marker for marker in TURN_ENDS if marker in known])

    def _probe(self, texts: list[str]) -> None:
        whole = self.tokenizer.encode_batch(texts)
        cut = [self._pieces(text) for text in texts]
        self._encode_missing(piece for pieces in cut for piece in pieces)
        joined = [self._joined(pieces) for pieces in cut]
        self._probes_left -= len(texts)
        forced = self.tokenizer.name == "bytes"
        self._in_pieces = forced or all(np.array_equal(a, b) for a, b in zip(whole, joined, strict=True))

    def _pieces(self, text: str) -> list[str]:
        pieces: list[str] = []
        for piece in self._markers.split(text):
            if len(piece) > 2 * MIN_PIECE_CHARS:
                pieces.extend(_cut_long(piece))
            elif piece:
                pieces.append(piece)
        return pieces

    def _encode_missing(self, pieces: Iterable[str]) -> None:
        missing = list({piece for piece in pieces if piece not in self._cache})
        if not missing:
            return
        size = sum(map(len, missing))
        if self._used_bytes + 5 * size > self._cache_bytes:
            self._cache.clear()
            self._used_bytes = 0
        self._used_bytes += 5 * size
        self._cache.update(zip(missing, self.tokenizer.encode_batch(missing), strict=True))

    def _joined(self, pieces: list[str]) -> TokenArray:
        if not pieces:
            return np.zeros(0, dtype=np.int32)
        for piece in pieces:
            if piece not in self._cache:
                self._encode_missing(pieces)
        return np.concatenate([self._cache[piece] for piece in pieces])


def _cut_long(piece: str) -> Iterator[str]:
    start = 0
    while len(piece) - start > 2 * MIN_PIECE_CHARS:
        cut = _SAFE_CUT.search(piece, start + MIN_PIECE_CHARS)
        if cut is None:
            break
        yield piece[start : cut.start()]
        start = cut.start()
    yield piece[start:]


def in_batches(
    requests: Iterable[Request], size: int = BATCH_REQUESTS, max_ids: int | None = None
) -> Iterator[list[Request]]:
    """Batches of `size` requests, or fewer where they come to `max_ids` hash ids together."""
    batch: list[Request] = []
    num_ids = 0
    for request in requests:
        batch.append(request)
        num_ids += len(request.hash_ids or ())
        if len(batch) == size or (max_ids is not None and num_ids >= max_ids):
            yield batch
            batch, num_ids = [], 0
    if batch:
        yield batch
