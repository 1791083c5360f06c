"""How long one step of a replica takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from caudex.simulate.model_shape import ModelShape
from caudex.sizing.gpus import Gpu


class StepWork(NamedTuple):
    """What one step computes.

    prefill_tokens   prompt tokens of all chunks in the step
    prefill_pairs    for each of them, the tokens it attends to, summed
    decodes          running requests, one token each
    context_tokens   KV tokens that those attend to, summed
    distinct_tokens  the same, those counted once that several requests share
    """

    prefill_tokens: int
    prefill_pairs: float
    decodes: int
    context_tokens: float
    distinct_tokens: float


class CostModel(Protocol):
    def step_seconds(self, work: StepWork) -> float: ...

    def front_seconds(self, num_tokens: int) -> float:
        """From a request's arrival to the queue of the engine: reading it, its chat template, its tokens."""
        ...

    def prefill_rate(self) -> float:
        """Tokens a second of long prefills, for those who plan with it."""
        ...


@dataclass(frozen=True, slots=True)
class RooflineModel:
    """The longer of arithmetic and memory traffic, at the given efficiencies, plus a fixed overhead a step.

    Arithmetic: 2 operations a parameter and token, 4 a head, dimension and pair of attention. Traffic: the weights once
    a step, and the KV that decoding requests read, each for itself. S. Williams,
    A. Waterman, D. Patterson, Roofline, CACM 52(4), 2009.
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

    def front_seconds(self, num_tokens: int) -> float:
        return 0.0

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
