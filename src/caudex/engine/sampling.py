"""From logits to tokens, for a whole batch, each row as if it were alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caudex.engine.batch import Int32Array
from caudex.engine.grammar import GrammarMatcher
from caudex.engine.types import SamplingParams, TokenLogprob

FloatArray: TypeAlias = NDArray[np.float32]
_MASK64 = (1 << 64) - 1
_RUN = 256
_COLDEST = 1e-5
"""Below this temperature all the probability is the best token's: such rows are greedy, and no quotient overflows."""
_LARGEST_LOGIT = np.float32(1e30)
"""Penalties can make a logit infinite, of which there is no softmax. This one wins as surely, at any temperature."""


@dataclass(frozen=True, slots=True)
class LogitBias:
    """What is added to the logits of single tokens."""

    token_ids: NDArray[np.int64]
    values: FloatArray


class SamplingRow(msgspec.Struct, frozen=True, gc=False):
    """What one row of logits is sampled with: nothing here depends on the rest of the batch.

    `seed` and `position` (index of the new token in its output) name the random number, so a request that was
    preempted, or served beside others, draws the same ones. `bias` is that of `params`, as arrays; `banned` tokens
    cannot be chosen, unless the grammar allows nothing else.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt: Int32Array
    output: Sequence[int]
    grammar: GrammarMatcher | None = None
    bias: LogitBias | None = None
    banned: Collection[int] = ()


def logit_bias(params: SamplingParams) -> LogitBias | None:
    """The bias of `params` as arrays, made once a request; None if it has none."""
    if not params.logit_bias:
        return None
    token_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
    return LogitBias(token_ids, np.fromiter(params.logit_bias.values(), dtype=np.float32))


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprob: TokenLogprob | None


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Choose one token a row.

    Every operation on a row reads that row only and sums it in an order that does not depend on the others, so the
    result for a row has the same bits in any batch.

    Args:
        logits: float32, shape (R, vocabulary).
        rows: R of them.
    """
    logits = logits.cpu()
    adjusted = _adjust(logits.numpy(), rows)
    token_ids = _choose(adjusted, rows)
    return [
        SampledToken(token_id, logprob)
        for token_id, logprob in zip(token_ids, _logprobs(logits, token_ids, rows), strict=True)
    ]


def accepted(tokens: list[SampledToken], draft: Sequence[int]) -> list[SampledToken]:
    """What is left of `tokens`, sampled one after the other behind those of `draft`: those up to the first wrong guess.

    Behind a wrong guess the logits are those of another text.
    """
    for place, (token, guessed) in enumerate(zip(tokens, draft, strict=False)):
        if token.token_id != guessed:
            return tokens[: place + 1]
    return tokens


def _adjust(logits: FloatArray, rows: Sequence[SamplingRow]) -> FloatArray:
    """Logits after penalties, bias and grammar; the array itself where no row has any."""
    touched = [index for index, row in enumerate(rows) if _has_adjustments(row)]
    if not touched:
        return logits
    adjusted = logits.copy()
    for index in touched:
        _penalise(adjusted[index], rows[index])
        bias = rows[index].bias
        if bias is not None:
            adjusted[index, bias.token_ids] += bias.values
        _forbid(adjusted[index], rows[index])
    return adjusted


def _forbid(logits: FloatArray, row: SamplingRow) -> None:
    """Leave one row the tokens that its grammar allows, in place, and of those the ones that are not banned."""
    if row.grammar is not None:
        logits[~row.grammar.allowed()] = -np.inf
    if row.banned:
        banned = list(row.banned)
        kept = logits[banned].copy()
        logits[banned] = -np.inf
        if logits.max() == -np.inf:
            logits[banned] = kept


def _has_adjustments(row: SamplingRow) -> bool:
    params = row.params
    return bool(
        row.bias is not None
        or row.banned
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or row.grammar is not None
    )


def _penalise(logits: FloatArray, row: SamplingRow) -> None:
    """Apply the penalties to one row, in place."""
    params = row.params
    output = np.asarray(row.output, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([row.prompt, output]))
        penalty = np.float32(params.repetition_penalty)
        with np.errstate(divide="ignore", over="ignore"):
            penalised = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        logits[seen] = penalised.clip(-_LARGEST_LOGIT, _LARGEST_LOGIT)
    if len(output) and (params.presence_penalty or params.frequency_penalty):
        generated, counts = np.unique(output, return_counts=True)
        logits[generated] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)


def _choose(logits: FloatArray, rows: Sequence[SamplingRow]) -> list[int]:
    """Token ids: the most likely where the temperature is 0, a draw elsewhere."""
    chosen: list[int] = logits.argmax(axis=-1).tolist()
    drawn = [index for index, row in enumerate(rows) if row.params.temperature >= _COLDEST]
    if not drawn:
        return chosen
    temperatures = torch.tensor([rows[index].params.temperature for index in drawn], dtype=torch.float32)
    scaled = _select(torch.from_numpy(logits), drawn) / temperatures[:, None]
    for index, logprobs in zip(drawn, torch.log_softmax(scaled, dim=-1).numpy(), strict=True):
        chosen[index] = _draw(logprobs, rows[index])
    return chosen


def _select(logits: Tensor, indices: Sequence[int]) -> Tensor:
    """The rows at `indices`, which ascend; without a copy if that is all of them."""
    return logits if len(indices) == len(logits) else logits[list(indices)]


def _draw(logprobs: FloatArray, row: SamplingRow) -> int:
    """Invert the cumulative distribution of what the filters leave at one uniform random number."""
    token_ids = _filter(logprobs, row.params)
    number = uniform(row.seed, row.position)
    if token_ids is None:
        return _invert_cumulative(np.exp(logprobs), number)
    return int(token_ids[_invert_cumulative(np.exp(logprobs[token_ids]), number)])


def _invert_cumulative(weights: FloatArray, number: float) -> int:
    """The first place where the running sum of `weights` exceeds `number` of the whole.

    Sums of runs first, then inside one run: a running sum over a whole vocabulary takes six times as long.
    """
    runs = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _RUN), dtype=np.float64))
    target = min(number * runs[-1], np.nextafter(runs[-1], 0.0))
    run = int(np.searchsorted(runs, target, side="right"))
    inside = np.cumsum(weights[run * _RUN : (run + 1) * _RUN], dtype=np.float64)
    rest = target - (runs[run - 1] if run else 0.0)
    place = int(np.searchsorted(inside, rest, side="right"))
    if place == len(inside):
        place = int(np.flatnonzero(weights[run * _RUN : (run + 1) * _RUN])[-1])
    return run * _RUN + place


def _filter(logprobs: FloatArray, params: SamplingParams) -> NDArray[np.int64] | None:
    """Token ids that top-k, top-p and min-p leave, most likely first; None for all of them."""
    if params.top_k == 0 and params.top_p == 1.0:
        if params.min_p == 0.0:
            return None
        return np.flatnonzero(logprobs >= logprobs.max() + np.log(np.float32(params.min_p)))
    token_ids = _most_likely(logprobs, params.top_k or 1, 0.0 if params.top_k else params.top_p)
    if params.top_k:
        token_ids = token_ids[: params.top_k]
    weights = np.exp(logprobs[token_ids], dtype=np.float64)
    cumulative = np.cumsum(weights)
    whole = cumulative[-1] if params.top_k else 1.0
    kept = 1 + int(np.searchsorted(cumulative[:-1], params.top_p * whole, side="left"))
    kept = min(kept, int((weights >= weights[0] * params.min_p).sum()))
    return token_ids[:kept]


def _most_likely(logprobs: FloatArray, count: int, mass: float) -> NDArray[np.int64]:
    """Token ids in falling order, ties by id: enough for `count` of them and a probability of `mass`.

    A full sort of a vocabulary takes 4 ms a row and `topk` 1 ms; picking what lies within a margin of the best and
    sorting that, widening the margin until it is enough, takes 0.05 ms.
    """
    best, margin = logprobs.max(), 8.0 if mass else 3.0
    while True:
        token_ids = np.flatnonzero(logprobs >= best - margin)
        everything = len(token_ids) == len(logprobs) or margin > 1e4
        enough = len(token_ids) >= count and np.exp(logprobs[token_ids]).sum(dtype=np.float64) >= mass
        if everything or enough:
            return token_ids[np.argsort(-logprobs[token_ids], kind="stable")]
        margin *= 2


def score(logits: Tensor, token_ids: Int32Array, num_top: int) -> list[TokenLogprob]:
    """Log-probabilities of given tokens, one a row of `logits`, and of the `num_top` most likely beside each."""
    logprobs = torch.log_softmax(logits.cpu(), dim=-1).numpy()
    return [token_logprob(row, token_id, num_top) for row, token_id in zip(logprobs, token_ids.tolist(), strict=True)]


def _logprobs(logits: Tensor, token_ids: Sequence[int], rows: Sequence[SamplingRow]) -> list[TokenLogprob | None]:
    """Log-probabilities of the chosen tokens under the model itself, for the rows that ask for them."""
    result: list[TokenLogprob | None] = [None] * len(rows)
    asking = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if asking:
        for index, logprobs in zip(asking, torch.log_softmax(_select(logits, asking), dim=-1).numpy(), strict=True):
            result[index] = token_logprob(logprobs, token_ids[index], rows[index].params.logprobs or 0)
    return result


def token_logprob(logprobs: FloatArray, token_id: int, num_top: int) -> TokenLogprob:
    """One token's log-probability and the `num_top` most likely tokens with theirs."""
    best = _most_likely(logprobs, num_top, 0.0)[:num_top] if num_top else np.empty(0, dtype=np.int64)
    top = tuple((int(other), float(logprobs[other])) for other in best)
    rank = 1 + int(np.count_nonzero(logprobs > logprobs[token_id]))
    return TokenLogprob(token_id, float(logprobs[token_id]), rank, top)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone: two rounds of SplitMix64 (Steele et al., 2014)."""
    mixed = _splitmix64(_splitmix64(seed & _MASK64) ^ (position & _MASK64))
    return (mixed >> 11) * 2.0**-53


def _splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)
