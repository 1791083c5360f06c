"""One replica in virtual time: the real prefix cache, continuous batching, chunked prefill."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from caudex.cache import OutOfBlocks, PrefixCache, Sequence
from caudex.routing import Flight
from caudex.simulate.cost_model import CostModel, StepWork


@dataclass(slots=True)
class Job:
    """One request at a replica. Lengths in tokens."""

    index: int
    path: NDArray[np.int32]
    input_length: int
    output_length: int
    flight: Flight
    sequence: Sequence | None = None
    cached: int = 0
    prefilled: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    num_blocks: int
    block_size: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    eviction: str = "lru"


@dataclass(slots=True)
class StepEvents:
    """What became true at the end of a step."""

    first_tokens: list[Job] = field(default_factory=list)
    finished: list[Job] = field(default_factory=list)
    refused: list[Job] = field(default_factory=list)


@dataclass(slots=True)
class _Plan:
    """Steps under way: `num_steps` of them, each longer than the last by `growth`, ending at `ends`."""

    begins: float
    first_seconds: float
    growth: float
    num_steps: int
    chunks: list[tuple[Job, int]]

    @property
    def ends(self) -> float:
        return self.begins + self.seconds(self.num_steps)

    def seconds(self, num_steps: int) -> float:
        return num_steps * self.first_seconds + self.growth * num_steps * (num_steps - 1) / 2


class Replica:
    """Steps as an engine does: every running request decodes one token a step, what is left of the token budget goes to
    prefill, first come first served. A request is admitted when its prompt and output fit the pool, and computes what
    the cache did not have then. Blocks are committed as their chunks are done.

    While nothing is prefilled and nobody waits, steps differ only in a context that grows evenly, so they are taken
    many at a time, up to the next finish; an arrival in between cuts them short at the next step's end. A step costs
    O(log running) however many requests run.
    """

    def __init__(self, limits: ReplicaLimits, cost: CostModel, partial_block_id: int) -> None:
        self._limits = limits
        self._cost = cost
        self._partial_block_id = partial_block_id
        self.cache = PrefixCache(limits.num_blocks, 1, policy=limits.eviction, manual_clock=True)
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._decoding: list[tuple[int, int, Job]] = []
        self._steps_done = 0
        self._context_tokens = 0.0
        self._plan: _Plan | None = None
        self.busy_seconds = 0.0

    @property
    def jobs(self) -> list[Job]:
        """All requests that are here."""
        return [*self._waiting, *self._prefilling, *(job for _, _, job in self._decoding)]

    @property
    def next_event(self) -> float | None:
        """When the steps under way end; None while idle."""
        return None if self._plan is None else self._plan.ends

    def arrive(self, job: Job, now: float) -> StepEvents:
        """Takes a request in. An idle replica begins with it at once."""
        self._waiting.append(job)
        if self._plan is None:
            events = StepEvents()
            self._begin(now, events)
            return events
        self._cut_short(now)
        return StepEvents()

    def advance(self) -> StepEvents:
        """Ends the steps under way and plans the next."""
        plan, events = self._plan, StepEvents()
        assert plan is not None
        now = plan.ends
        self.busy_seconds += now - plan.begins
        self.cache.set_time(now)
        self._end_decodes(plan.num_steps, events)
        self._end_chunks(plan.chunks, events)
        self._begin(now, events)
        return events

    def _end_decodes(self, num_steps: int, events: StepEvents) -> None:
        self._steps_done += num_steps
        self._context_tokens += num_steps * len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._steps_done:
            self._finish(heapq.heappop(self._decoding)[2], events)

    def _end_chunks(self, chunks: list[tuple[Job, int]], events: StepEvents) -> None:
        for job, num_tokens in chunks:
            job.prefilled += num_tokens
            assert job.sequence is not None
            num_blocks = min(len(job.path), job.prefilled // self._limits.block_size)
            if num_blocks > job.sequence.num_committed_tokens:
                job.sequence.commit(num_blocks)
            if job.prefilled < job.input_length:
                continue
            self._prefilling.popleft()
            events.first_tokens.append(job)
            self._context_tokens += job.input_length + 1
            if job.output_length <= 1:
                self._finish(job, events)
            else:
                heapq.heappush(self._decoding, (self._steps_done + job.output_length - 1, job.index, job))

    def _finish(self, job: Job, events: StepEvents) -> None:
        assert job.sequence is not None
        self._context_tokens -= job.input_length + job.output_length
        job.sequence.release()
        events.finished.append(job)

    def _begin(self, now: float, events: StepEvents) -> None:
        self._admit(events)
        budget = self._limits.max_num_batched_tokens - len(self._decoding)
        chunks, pairs = self._chunks(max(0, budget))
        if not chunks and not self._decoding:
            self._plan = None
            return
        decodes = len(self._decoding)
        work = StepWork(sum(n for _, n in chunks), pairs, decodes, self._context_tokens)
        first = self._cost.step_seconds(work)
        if chunks:
            self._plan = _Plan(now, first, 0.0, 1, chunks)
            return
        grown = StepWork(0, 0.0, decodes, self._context_tokens + decodes)
        num_steps = max(1, self._decoding[0][0] - self._steps_done)
        self._plan = _Plan(now, first, self._cost.step_seconds(grown) - first, num_steps, [])

    def _admit(self, events: StepEvents) -> None:
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._limits.max_num_seqs:
            job = self._waiting[0]
            if not self._reserve(job):
                if self._prefilling or self._decoding:
                    return
                events.refused.append(self._waiting.popleft())  # it does not fit even alone
                continue
            self._prefilling.append(self._waiting.popleft())

    def _reserve(self, job: Job) -> bool:
        """Pins what is cached and takes blocks for the rest of prompt and output; False, and no change, if they do not
        fit. The last, partial block of a prompt is its own: it is never committed, so never shared."""
        size = self._limits.block_size
        total = math.ceil((job.input_length + job.output_length) / size)
        prompt = job.path if job.input_length % size == 0 else np.append(job.path, np.int32(self._partial_block_id))
        sequence = self.cache.begin(prompt)
        sequence.append(np.full(total - len(prompt), self._partial_block_id, dtype=np.int32))
        try:
            sequence.allocate(total)
        except OutOfBlocks:
            sequence.release()
            return False
        job.sequence = sequence
        job.cached = job.prefilled = sequence.num_cached_tokens * size
        return True

    def _chunks(self, budget: int) -> tuple[list[tuple[Job, int]], float]:
        chunks: list[tuple[Job, int]] = []
        pairs = 0.0
        for job in self._prefilling:
            if budget <= 0:
                break
            num_tokens = min(budget, job.input_length - job.prefilled)
            pairs += num_tokens * (job.prefilled + (num_tokens + 1) / 2)
            chunks.append((job, num_tokens))
            budget -= num_tokens
        return chunks, pairs

    def _cut_short(self, now: float) -> None:
        """Lets the steps under way end at the next step's end after `now`."""
        plan = self._plan
        assert plan is not None
        if plan.num_steps == 1:
            return
        elapsed = now - plan.begins
        steps = elapsed / plan.first_seconds
        if plan.growth > 0:
            b = plan.first_seconds - plan.growth / 2
            steps = (math.sqrt(b * b + 2 * plan.growth * elapsed) - b) / plan.growth
        plan.num_steps = min(plan.num_steps, max(1, math.ceil(steps - 1e-9)))
