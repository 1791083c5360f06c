"""A cost model fitted to what a live server was seen to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from caudex.simulate.cost_model import StepWork

_REWEIGHTINGS = 8
_ORDINARY_ERROR = 0.05


class FittedModel(msgspec.Struct, frozen=True):
    """A step is linear in its work, and so is what comes before a request's first step.

    A server that reads KV once for all requests that share it has most of its cost of context in the distinct tokens;
    one that reads it for each has none there.
    """

    overhead_seconds: float
    seconds_per_prefill_token: float
    seconds_per_prefill_pair: float
    seconds_per_decode: float
    seconds_per_context_token: float
    seconds_per_request: float = 0.0
    seconds_per_prompt_token: float = 0.0
    seconds_per_distinct_token: float = 0.0

    def step_seconds(self, work: StepWork) -> float:
        return (
            self.overhead_seconds
            + self.seconds_per_prefill_token * work.prefill_tokens
            + self.seconds_per_prefill_pair * work.prefill_pairs
            + self.seconds_per_decode * work.decodes
            + self.seconds_per_context_token * work.context_tokens
            + self.seconds_per_distinct_token * work.distinct_tokens
        )

    def front_seconds(self, num_tokens: int) -> float:
        return self.seconds_per_request + self.seconds_per_prompt_token * num_tokens

    def prefill_rate(self) -> float:
        """Of a prompt of 1,024 tokens, by all that grows with its length."""
        tokens = 1_024
        linear = self.seconds_per_prefill_token + self.seconds_per_prompt_token
        return 1.0 / (linear + self.seconds_per_prefill_pair * (tokens + 1) / 2)


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What something took that consists of so many steps with so much work in all, as in `StepWork`, and so many
    requests, with prompts of so many tokens, on their way to the engine."""

    seconds: float
    steps: int = 0
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    decodes: float = 0.0
    context_tokens: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    distinct_tokens: float = 0.0

    def work(self) -> tuple[float, ...]:
        """In the order of `FittedModel`'s fields."""
        step = (self.steps, self.prefill_tokens, self.prefill_pairs, self.decodes, self.context_tokens)
        return (*step, self.requests, self.prompt_tokens, self.distinct_tokens)


@dataclass(frozen=True, slots=True)
class Fit:
    """A model, and by which share it is off what was measured: in the median, and at worst."""

    model: FittedModel
    median_error: float
    worst_error: float


def fit_model(measurements: Sequence[Measurement]) -> Fit:
    """Coefficients, none below zero, that minimise the squares of the relative errors, weighed by seconds: unweighed,
    many short steps outvote the long ones, in which a server's time goes; absolute errors would say nothing of short
    ones. The loss is Huber's: an error beyond a few percent counts by its size and not by its square, so that a hiccup
    of the server does not bend the fit.

    ValueError for fewer than five measurements, or where prefill seems to cost nothing.
    """
    if len(measurements) < 5:
        raise ValueError(f"{len(measurements)} measurements are too few: at least five are needed")
    seconds = np.array([m.seconds for m in measurements])
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise ValueError("a measurement took no time, or no number of seconds")
    work = np.array([m.work() for m in measurements], dtype=np.float64)
    scale = np.maximum(work.max(axis=0), 1e-12)
    design = work / scale / seconds[:, None]
    weight = np.sqrt(seconds / np.median(seconds))
    trust = np.ones(len(design))
    for _ in range(_REWEIGHTINGS):
        weights = _non_negative_least_squares(design, trust * weight)
        errors = np.abs(design @ weights - 1.0)
        trust = np.sqrt(np.minimum(1.0, _ORDINARY_ERROR / np.maximum(errors, 1e-12)))
    model = FittedModel(*(weights / scale).tolist())
    if not _grows_with_the_prompt(model):
        raise ValueError("the measurements show no cost of prefill; measure prompts of several lengths")
    return Fit(model, float(np.median(errors)), float(errors.max()))


def _grows_with_the_prompt(model: FittedModel) -> bool:
    return model.seconds_per_prefill_token + model.seconds_per_prefill_pair + model.seconds_per_prompt_token > 0


def _non_negative_least_squares(design: NDArray[np.float64], trust: NDArray[np.float64]) -> NDArray[np.float64]:
    """The weights, none below zero, by which the columns come closest to all ones, rows weighed by `trust`.

    Solved by trying every set of weights that may be above zero (255 of eight): the best feasible one is the optimum.
    """
    design, target = design * trust[:, None], trust
    num_columns = design.shape[1]
    used = [j for j in range(num_columns) if design[:, j].any()]
    best, best_error = np.zeros(num_columns), np.inf
    for size in range(1, len(used) + 1):
        for columns in map(list, combinations(used, size)):
            solved = np.linalg.lstsq(design[:, columns], target, rcond=None)[0]
            error = float(((design[:, columns] @ solved - target) ** 2).sum())
            if (solved >= 0).all() and error < best_error:
                best, best_error = np.zeros(num_columns), error
                best[columns] = solved
    return best


class CostModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """What `caudex simulate --save-fit` keeps: the model, the server's limits as far as it tells them, and the
    measurements that it stands on."""

    version: int = 1
    model: FittedModel
    capacity_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    measurements: list[Measurement] = []

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"


def read_cost_model(content: bytes) -> CostModelFile:
    """Takes back what `CostModelFile.encode` gave; ValueError for anything else."""
    try:
        file = msgspec.json.decode(content, type=CostModelFile)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a cost model: {error}") from error
    if file.version != 1:
        raise ValueError(f"the cost model has version {file.version}; this Caudex reads version 1")
    coefficients = msgspec.structs.astuple(file.model)
    if not all(np.isfinite(c) and c >= 0 for c in coefficients) or not _grows_with_the_prompt(file.model):
        raise ValueError("the coefficients of a cost model are numbers of seconds, not below 0, above 0 for prefill")
    return file
