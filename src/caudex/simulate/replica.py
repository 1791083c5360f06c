"""One replica in virtual time: the real prefix cache, continuous batching, chunked prefill."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from caudex.cache import OutOfBlocks, PrefixCache, Sequence
from caudex.routing import Flight
from caudex.simulate.cost_model import CostModel, StepWork

DEFAULT_EVICTION = "gittins"
"""As the cache's own default."""

_CANDIDATES_A_STEP = 64
"""Waiting requests, oldest first, that are looked up for admission in one step, as in the engine."""


@dataclass(slots=True, eq=False)
class Job:
    """One request at a replica. Lengths in tokens; `path` and `own_id` as in `Workload`."""

    index: int
    path: NDArray[np.int32]
    own_id: int
    input_length: int
    output_length: int
    flight: Flight
    sequence: Sequence | None = None
    cached: int = 0
    prefilled: int = 0
    overtakes: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """Size and settings of a replica; `block_size` is the workload's.

    worth_waiting   tokens that a request must be spared for it to wait for another that is computing them
    max_overtakes   younger requests that may be admitted before an older one
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    eviction: str = DEFAULT_EVICTION
    worth_waiting: int = 16
    max_overtakes: int = 64

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "worth_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"({self.max_num_seqs}): every running request needs a token a step"
            )


@dataclass(slots=True)
class StepEvents:
    """What became true at the end of a step."""

    first_tokens: list[Job] = field(default_factory=list)
    finished: list[Job] = field(default_factory=list)
    refused: list[Job] = field(default_factory=list)


class Replica:
    """Steps by the engine's rules (`caudex.engine.scheduler`), which the tests hold it to.

    Every running request decodes one token a step; what is left of the token budget goes to the prompts in prefill,
    oldest admission first, then to waiting requests. Of those the best is admitted first: the share of its prompt that
    is cached, plus its overtakes over `max_overtakes`; one that was overtaken `max_overtakes` times comes before all.
    One whose beginning is being computed by another waits for it. A chunk's blocks are matchable from the step that
    computes it.

    Unlike the engine, a request is admitted when prompt and whole output fit the pool, so nothing is preempted; and the
    last, partial block of a prompt is its own, never shared. What was generated stays cached like a prompt.

    While nothing is prefilled and nobody waits, steps differ only in a context that grows evenly, so they are taken
    many at a time, up to the next finish; an arrival in between cuts them short at the next step's end. A step costs
    O(log running) however many requests run.

    Attributes:
        next_event: when the steps under way end; infinity while idle.
        busy_seconds: of steps that have ended.
        computed_tokens: prompt tokens of chunks whose step has ended.
    """

    def __init__(self, limits: ReplicaLimits, cost: CostModel) -> None:
        self._limits = limits
        self._cost = cost
        self.cache = PrefixCache(limits.num_blocks, 1, policy=limits.eviction, manual_clock=True)
        self._waiting: list[Job] = []
        self._prefilling: list[Job] = []
        self._decoding: list[tuple[int, int, Job]] = []
        self._steps_done = 0
        self._context_tokens = 0
        self._held_blocks = 0
        # The steps under way: so many, the first so long, each longer than the last by the growth.
        self._begins = 0.0
        self._first_seconds = 0.0
        self._growth = 0.0
        self._num_steps = 0
        self._chunks: list[tuple[Job, int]] = []
        self.next_event = math.inf
        self.busy_seconds = 0.0
        self.computed_tokens = 0

    @property
    def jobs(self) -> list[Job]:
        """All requests that are here."""
        return [*self._waiting, *self._prefilling, *(job for _, _, job in self._decoding)]

    def arrive(self, job: Job, now: float) -> StepEvents | None:
        """Takes a request in. An idle replica begins with it at once, and tells what came of that."""
        self._waiting.append(job)
        if self.next_event != math.inf:
            self._cut_short(now)
            return None
        events = StepEvents()
        self.cache.set_time(now)
        self._begin(now, events)
        return events

    def advance(self) -> StepEvents:
        """Ends the steps under way and begins the next."""
        now, events = self.next_event, StepEvents()
        self.busy_seconds += now - self._begins
        self.cache.set_time(now)
        self._end_decodes(events)
        if self._chunks:
            self._end_chunks(events)
        self._begin(now, events)
        return events

    def _end_decodes(self, events: StepEvents) -> None:
        self._steps_done += self._num_steps
        self._context_tokens += self._num_steps * len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._steps_done:
            self._finish(heapq.heappop(self._decoding)[2], events)

    def _end_chunks(self, events: StepEvents) -> None:
        for job, num_tokens in self._chunks:
            self.computed_tokens += num_tokens
            if job.prefilled < job.input_length:
                continue
            self._prefilling.remove(job)
            events.first_tokens.append(job)
            self._context_tokens += job.input_length + 1
            if job.output_length <= 1:
                self._finish(job, events)
            else:
                heapq.heappush(self._decoding, (self._steps_done + job.output_length - 1, job.index, job))

    def _finish(self, job: Job, events: StepEvents) -> None:
        assert job.sequence is not None
        self._context_tokens -= job.input_length + job.output_length
        self._held_blocks -= self._num_blocks(job)
        # The last token generated is never computed.
        job.sequence.commit((job.input_length + job.output_length - 1) // self._limits.block_size)
        job.sequence.release()
        events.finished.append(job)

    def _begin(self, now: float, events: StepEvents) -> None:
        self._chunks = []
        decodes = len(self._decoding)
        budget = self._limits.max_num_batched_tokens - decodes
        for job in self._prefilling:
            budget -= self._schedule(job, budget)
        if self._waiting:
            self._admit(budget, events)
        if not self._chunks and not decodes:
            self.next_event = math.inf
            return
        self._begins = now
        context, distinct = self._context_tokens, self._distinct_tokens()
        if self._chunks:
            work = StepWork(sum(n for _, n in self._chunks), self._pairs(), decodes, context, distinct)
            self._num_steps, self._growth = 1, 0.0
            self._first_seconds = self._cost.step_seconds(work)
        else:
            self._num_steps = max(1, self._decoding[0][0] - self._steps_done)
            self._first_seconds = self._cost.step_seconds(StepWork(0, 0.0, decodes, context, distinct))
            grown = self._cost.step_seconds(StepWork(0, 0.0, decodes, context + decodes, distinct + decodes))
            self._growth = grown - self._first_seconds
        self._set_end()

    def _schedule(self, job: Job, budget: int) -> int:
        """Puts the next chunk of a prompt into the step; its length, 0 if the budget is spent."""
        num_tokens = min(budget, job.input_length - job.prefilled)
        if num_tokens <= 0:
            return 0
        job.prefilled += num_tokens
        num_blocks = min(len(job.path), job.prefilled // self._limits.block_size)
        assert job.sequence is not None
        if num_blocks > job.sequence.num_committed_tokens:
            job.sequence.commit(num_blocks)
        self._chunks.append((job, num_tokens))
        return num_tokens

    def _pairs(self) -> float:
        """What the tokens of this step's chunks attend to, summed."""
        return sum(n * (job.prefilled - (n - 1) / 2) for job, n in self._chunks)

    def _distinct_tokens(self) -> int:
        """Of the context that is read in this step, what no other request in it has read: exact while nothing is
        prefilled, else less what prompts in prefill have in common with it."""
        num_shared = self._held_blocks - self.cache.num_pinned_blocks
        return max(0, self._context_tokens - num_shared * self._limits.block_size)

    def _num_blocks(self, job: Job) -> int:
        """For prompt and output."""
        return -(-(job.input_length + job.output_length) // self._limits.block_size)

    def _admit(self, budget: int, events: StepEvents) -> None:
        skipped: set[int] = set()
        cached = self._look_up()
        while self._waiting and budget > 0:
            if len(self._prefilling) + len(self._decoding) >= self._limits.max_num_seqs:
                return
            job = self._best(cached, skipped)
            if job is None:
                return
            overdue = job.overtakes >= self._limits.max_overtakes
            if (overdue or not self._awaits_prefix(job)) and self._reserve(job):
                self._start(job)
                budget -= self._schedule(job, budget)
            elif not self._prefilling and not self._decoding:
                self._waiting.remove(job)
                events.refused.append(job)  # it does not fit even alone
            elif overdue:
                return
            else:
                skipped.add(job.index)

    def _look_up(self) -> dict[int, int]:
        """Cached blocks of those whose turn it may be, by request; nothing if there is no choice."""
        candidates = self._waiting[:_CANDIDATES_A_STEP]
        if len(candidates) == 1:
            return {}
        counts = self.cache.count_cached([job.path for job in candidates]).tolist()
        return dict(zip((job.index for job in candidates), counts, strict=True))

    def _best(self, cached: dict[int, int], skipped: set[int]) -> Job | None:
        if len(self._waiting) == 1:
            return None if self._waiting[0].index in skipped else self._waiting[0]
        limit, size = self._limits.max_overtakes, self._limits.block_size
        best, best_score = None, -1.0
        for job in self._waiting[:_CANDIDATES_A_STEP]:
            if job.overtakes >= limit:
                return None if job.index in skipped else job
            score = cached.get(job.index, 0) * size / job.input_length + job.overtakes / max(1, limit)
            if score > best_score and job.index not in skipped:
                best, best_score = job, score
        return best

    def _awaits_prefix(self, job: Job) -> bool:
        """Whether another is about to compute what would spare this one at least `worth_waiting` tokens."""
        size, cached = self._limits.block_size, -1
        for other in self._prefilling:
            if other.prefilled >= other.input_length:
                continue
            to_come = min(_common_length(job.path, other.path) * size, job.input_length - 1)
            if to_come <= other.prefilled:
                continue
            if cached < 0:
                cached = self.cache.match(job.path).num_tokens * size
            if to_come - cached >= self._limits.worth_waiting:
                return True
        return False

    def _reserve(self, job: Job) -> bool:
        """Pins what is cached and takes blocks for the rest of prompt and output; False, and no change, if they do not
        fit."""
        size = self._limits.block_size
        total = self._num_blocks(job)
        if total > self._limits.num_blocks:
            return False
        tokens = np.full(total, job.own_id, dtype=np.int32)
        tokens[: len(job.path)] = job.path
        prompt_blocks = -(-job.input_length // size)
        sequence = self.cache.begin(tokens[:prompt_blocks])
        sequence.append(tokens[prompt_blocks:])
        try:
            sequence.allocate(total)
        except OutOfBlocks:
            sequence.release()
            return False
        job.sequence = sequence
        self._held_blocks += total
        job.cached = job.prefilled = sequence.num_cached_tokens * size
        return True

    def _start(self, job: Job) -> None:
        place = self._waiting.index(job)
        for older in self._waiting[:place]:
            older.overtakes += 1
        del self._waiting[place]
        self._prefilling.append(job)

    def _set_end(self) -> None:
        n = self._num_steps
        self.next_event = self._begins + n * self._first_seconds + self._growth * n * (n - 1) / 2

    def _cut_short(self, now: float) -> None:
        """Lets the steps under way end at the next step's end after `now`."""
        if self._num_steps == 1:
            return
        elapsed = now - self._begins
        steps = elapsed / self._first_seconds
        if self._growth > 0:
            b = self._first_seconds - self._growth / 2
            steps = (math.sqrt(b * b + 2 * self._growth * elapsed) - b) / self._growth
        self._num_steps = min(self._num_steps, max(1, math.ceil(steps - 1e-9)))
        self._set_end()


def _common_length(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """Leading ids that two paths share. Ids are chained, so they differ everywhere behind the first difference."""
    length = min(len(left), len(right))
    return int(np.count_nonzero(left[:length] == right[:length]))
