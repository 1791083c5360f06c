"""Cuts texts where what stands around a stretch changes from text to text: at the ends of passages that move.

A k-gram that goes on in two ways, or that two things come before, ends or begins a stretch that is always found whole
(a unitig of the texts' de Bruijn graph; Compeau, Pevzner & Tesler, "How to apply de Bruijn graphs to genome assembly",
2011). No separator need be known, so that it works on token ids, of which nothing is.

one text:    | head | A | B | C | rest        cut before A: head is followed by A here, by C there
another:     | head | C | A | B | rest        A | B stay one stretch where no text parts them
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_SCRAMBLE = np.uint64(0x9E3779B97F4A7C15)
_BASE = 0xBF58476D1CE4E5B9
_INVERSE = pow(_BASE, -1, 1 << 64)


class Cutter:
    """Knows, from sample texts, where texts like them are to be cut. Cost: a sort of the sample's k-grams to make it,
    a look-up a character to cut. K-grams are compared by 64-bit hashes; beyond its ends a text has blanks without end,
    so that a passage that comes first or last is cut like any other."""

    def __init__(self, sample: Iterable[str], k: int) -> None:
        """`k`: shorter than the passages to be found, longer than what recurs inside them."""
        self._k = k
        padded = [_padded(text, k) for text in sample]
        grams = np.concatenate([_grams(codes, k) for codes in padded])
        self._ends = _ambiguous(grams, np.concatenate([np.append(codes[k:], _BLANK) for codes in padded]))
        self._starts = _ambiguous(grams, np.concatenate([np.append(_BLANK, codes[:-k]) for codes in padded]))

    def cut(self, text: str) -> list[str]:
        """The stretches of a text, in order; their concatenation is the text."""
        grams = _grams(_padded(text, self._k), self._k)
        starts = np.flatnonzero(_among(grams, self._starts)) - self._k
        ends = np.flatnonzero(_among(grams, self._ends))
        cuts = np.union1d(starts, ends)
        inside = cuts[(cuts > 0) & (cuts < len(text))].tolist()
        return [text[a:b] for a, b in pairwise([0, *inside, len(text)])]


_BLANK = np.uint32(0)


def _padded(text: str, k: int) -> NDArray[np.uint32]:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return np.pad(codes, k)


def _among(values: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which values are among `known`, which is in order."""
    if not len(known):
        return np.zeros(len(values), dtype=np.bool_)
    nearest = known[np.minimum(np.searchsorted(known, values), len(known) - 1)]
    return np.equal(nearest, values)


def _grams(codes: NDArray[np.uint32], k: int) -> NDArray[np.uint64]:
    """A hash of the k characters from each place on; shape (len(codes) - k + 1,).

    The hash is the polynomial sum(x[i] * B**i) over a window, modulo 2**64, divided by the power that its place gives:
    B is odd, and so has an inverse. Characters are scrambled first, since such sums are weak on small numbers.
    """
    mixed = codes.astype(np.uint64) * _SCRAMBLE
    mixed ^= mixed >> np.uint64(31)
    powers: NDArray[np.uint64] = _powers(_BASE, len(codes))
    inverses: NDArray[np.uint64] = _powers(_INVERSE, len(codes))
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(mixed * powers, dtype=np.uint64)])
    hashes: NDArray[np.uint64] = (sums[k:] - sums[:-k]) * inverses[: len(codes) - k + 1]
    return hashes


@lru_cache(maxsize=8)
def _table(base: int, size: int) -> NDArray[np.uint64]:
    factors = np.full(size, base, dtype=np.uint64)
    factors[0] = 1
    return factors.cumprod(dtype=np.uint64)


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """The first `count` powers, from a table that is made for a power of two of them."""
    return _table(base, 1 << max(count - 1, 1).bit_length())[:count]


def _ambiguous(grams: NDArray[np.uint64], neighbours: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """The k-grams that stand beside more than one thing, in order."""
    order = np.argsort(grams)
    grams, neighbours = grams[order], neighbours[order]
    return np.unique(grams[1:][(grams[1:] == grams[:-1]) & (neighbours[1:] != neighbours[:-1])])
