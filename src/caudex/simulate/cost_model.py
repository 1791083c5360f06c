"""How long one step of a replica takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from caudex.simulate.model_shape import ModelShape
from caudex.sizing.gpus import Gpu


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes.

    prefill_tokens   prompt tokens of all chunks in the step
    prefill_pairs    for each of them, the tokens it attends to, summed
    decodes          running requests, one token each
    context_tokens   KV tokens that those read, summed
    """

    prefill_tokens: int
    prefill_pairs: float
    decodes: int
    context_tokens: float


class CostModel(Protocol):
    def step_seconds(self, work: StepWork) -> float: ...

    def prefill_rate(self) -> float:
        """Tokens a second of long prefills, for those who plan with it."""
        ...


@dataclass(frozen=True, slots=True)
class RooflineModel:
    """The longer of arithmetic and memory traffic, at the given efficiencies, plus a fixed overhead a step.

    Arithmetic: 2 operations a parameter and token, 4 a head, dimension and pair of attention. Traffic: the weights once
    a step, and the KV that decoding requests read. S. Williams, A. Waterman, D. Patterson, Roofline, CACM 52(4), 2009.
    """

    model: ModelShape
    gpu: Gpu
    gpus: int = 1
    compute_efficiency: float = 0.55
    memory_efficiency: float = 0.8
    overhead_seconds: float = 0.002

    def step_seconds(self, work: StepWork) -> float:
        model, gpu = self.model, self.gpu
        flops = model.flops_per_token * (work.prefill_tokens + work.decodes)
        flops += model.attention_flops_per_pair * (work.prefill_pairs + work.context_tokens)
        traffic = model.weight_bytes + model.kv_bytes_per_token * work.context_tokens
        compute = flops / (gpu.flops_per_second * self.gpus * self.compute_efficiency)
        memory = traffic / (gpu.bytes_per_second * self.gpus * self.memory_efficiency)
        return max(compute, memory) + self.overhead_seconds

    def prefill_rate(self) -> float:
        return self.gpu.flops_per_second * self.gpus * self.compute_efficiency / self.model.flops_per_token

    def kv_capacity_tokens(self, memory_share: float = 0.9) -> int:
        """KV slots that fit beside the weights; ValueError if the weights alone do not."""
        free = self.gpu.memory_bytes * self.gpus * memory_share - self.model.weight_bytes
        tokens = int(free / self.model.kv_bytes_per_token)
        if tokens < 1:
            raise ValueError(
                f"{self.model.name} needs {self.model.weight_bytes / 1e9:.0f} GB for weights alone; "
                f"{self.gpus} x {self.gpu.name} has {self.gpu.memory_bytes * self.gpus / 1e9:.0f} GB"
            )
        return tokens


@dataclass(frozen=True, slots=True)
class FittedModel:
    """A step is linear in its work, with coefficients measured on a real server."""

    overhead_seconds: float
    seconds_per_prefill_token: float
    seconds_per_prefill_pair: float
    seconds_per_decode: float
    seconds_per_context_token: float

    def step_seconds(self, work: StepWork) -> float:
        return (
            self.overhead_seconds
            + self.seconds_per_prefill_token * work.prefill_tokens
            + self.seconds_per_prefill_pair * work.prefill_pairs
            + self.seconds_per_decode * work.decodes
            + self.seconds_per_context_token * work.context_tokens
        )

    def prefill_rate(self) -> float:
        return 1.0 / self.seconds_per_prefill_token


def fit_cost_model(works: Sequence[StepWork], seconds: Sequence[float]) -> FittedModel:
    """Non-negative least squares over measured steps, relative errors weighed equally.

    Solved by coordinate descent, which keeps coefficients at zero or above without another dependency. ValueError for
    fewer than five measurements.
    """
    if len(works) != len(seconds) or len(works) < 5:
        raise ValueError(f"{len(works)} measurements of {len(seconds)} times are too few: at least five are needed")
    times = np.asarray(seconds, dtype=np.float64)
    rows = np.array([[1.0, w.prefill_tokens, w.prefill_pairs, w.decodes, w.context_tokens] for w in works])
    scale = np.maximum(rows.max(axis=0), 1e-12)
    design = rows / scale / times[:, None]
    target = np.ones(len(times))
    weights = np.zeros(rows.shape[1])
    for _ in range(5_000):
        for j in range(len(weights)):
            column = design[:, j]
            norm = float(column @ column)
            if norm > 0:
                residual = target - design @ weights + column * weights[j]
                weights[j] = max(0.0, float(column @ residual) / norm)
    coefficients = weights / scale
    if coefficients[1] <= 0:
        raise ValueError("the measurements show no cost of prefill; measure prompts of several lengths")
    return FittedModel(*(float(c) for c in coefficients))


class _MeasuredStep(msgspec.Struct):
    seconds: float
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    decodes: int = 0
    context_tokens: float = 0.0


def fit_steps(measured: bytes) -> FittedModel:
    """Fits measured steps: a JSON list of objects with `seconds` and the fields of `StepWork`, 0 where left out."""
    try:
        steps = msgspec.json.decode(measured, type=list[_MeasuredStep])
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a list of measured steps: {error}") from error
    works = [StepWork(s.prefill_tokens, s.prefill_pairs, s.decodes, s.context_tokens) for s in steps]
    return fit_cost_model(works, [s.seconds for s in steps])
