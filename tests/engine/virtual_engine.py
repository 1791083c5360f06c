"""A scheduler's world without a model: time is steps, KV is the identity of a token's whole prefix."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from caudex.cache import BlockCopy, PrefixCache
from caudex.engine.drafting import Drafting
from caudex.engine.scheduler import Scheduler
from caudex.engine.sequence_state import SequenceState
from caudex.engine.step import Step
from caudex.engine.types import TokenLogprob

VOCAB = 4


def prefix_identities(tokens: np.ndarray, namespace: str) -> list[int]:
    """For each position, a number that stands for the namespace and all tokens up to it."""
    identity, result = hash(namespace), []
    for token in tokens.tolist():
        identity = hash((identity, token))
        result.append(identity)
    return result


def next_token(identity: int) -> int:
    """The language model of this world: the next token is a function of the prefix."""
    return (identity >> 5) % VOCAB


def expected_output(prompt: np.ndarray, namespace: str, length: int) -> list[int]:
    output: list[int] = []
    for _ in range(length):
        tokens = np.concatenate([prompt, np.array(output, dtype=np.int32)])
        output.append(next_token(prefix_identities(tokens, namespace)[-1]))
    return output


def expected_scores(tokens: np.ndarray, namespace: str, num_alternatives: int) -> list[TokenLogprob]:
    """What scoring tokens 1, 2 ... finds in this world: numbers that stand for the whole prefix."""
    scores = []
    for token, identity in zip(tokens[1:].tolist(), prefix_identities(tokens, namespace)[1:], strict=True):
        number = float(np.float32(identity % 10_007))
        top = tuple((token + place, number - place) for place in range(num_alternatives))
        scores.append(TokenLogprob(token, number, 1 + identity % 7, top))
    return scores


@dataclass
class VirtualEngine:
    """Runs steps of a scheduler and checks each one against what a model would have read and written."""

    cache: PrefixCache
    scheduler: Scheduler
    max_num_seqs: int
    token_budget: int
    slots: dict[int, int] = field(default_factory=dict)
    finished: dict[str, SequenceState] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    admissions: list[SequenceState] = field(default_factory=list)
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_forks: int = 0

    def submit(self, state: SequenceState) -> None:
        self.scheduler.add(state)

    def abort(self, state: SequenceState) -> None:
        self.aborted.add(state.request_id)
        self.scheduler.finish(state)

    def step(self) -> Step:
        running_before = {state.request_id for state in self.scheduler.running}
        step = self.scheduler.schedule()
        admitted = [s for s in self.scheduler.running if s.request_id not in running_before]
        assert not (step.num_preempted and admitted), "a request took the place of one that had just given way"
        self.admissions += admitted
        self.num_steps += 1
        self.num_computed_tokens += step.num_tokens
        assert step.num_tokens <= self.token_budget
        assert len(step.chunks) <= self.max_num_seqs
        assert step.num_tokens == sum(chunk.num_tokens for chunk in step.chunks)
        if self.scheduler.has_requests:
            assert step.chunks, "a step with requests and nothing to do"
        self._copy(step.copies)
        self._write(step)
        self._read(step)
        self._score(step)
        self.scheduler.complete(step)
        self._copy(step.fork_copies)
        self.admissions += [state for _, state in step.forks]
        self.num_forks += len(step.forks)
        self._sample(step)
        self.scheduler.check_invariants()
        self.cache.check_invariants()
        return step

    def _copy(self, copies: list[BlockCopy]) -> None:
        size = self.cache.block_size
        for copy in copies:
            for offset in range(copy.num_slots):
                self.slots[copy.dst * size + offset] = self.slots[copy.src * size + offset]

    def _slot(self, state: SequenceState, position: int) -> int:
        size = self.cache.block_size
        return int(state.block_table[position // size]) * size + position % size

    def _write(self, step: Step) -> None:
        for chunk in step.chunks:
            identities = prefix_identities(np.append(chunk.state.tokens(), chunk.draft), chunk.state.namespace)
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                self.slots[self._slot(chunk.state, position)] = identities[position]

    def _read(self, step: Step) -> None:
        for chunk in step.chunks:
            identities = prefix_identities(np.append(chunk.state.tokens(), chunk.draft), chunk.state.namespace)
            for position in range(chunk.start + chunk.num_tokens):
                assert self.slots.get(self._slot(chunk.state, position)) == identities[position], (
                    f"{chunk.state.request_id} would read another prefix's KV at position {position}"
                )

    def _score(self, step: Step) -> None:
        for chunk in step.chunks:
            state = chunk.state
            if state.is_scoring:
                assert len(state.prompt_scores) == chunk.start
                scores = expected_scores(state.prompt, state.namespace, state.num_alternatives or 0)
                scores = scores[chunk.start : chunk.end]
                state.prompt_scores += scores
                self.scheduler.scores.keep(state.block_table, chunk.start + 1, scores)

    def _sample(self, step: Step) -> None:
        for sampling in step.samplings():
            state, num_right = sampling.state, 0
            assert len(sampling.rows) == 1 + len(sampling.draft)
            state.output.append(self._next_token(state))
            while sampling.draft[num_right : num_right + 1] == (state.output[-1],):
                num_right += 1
                state.output.append(self._next_token(state))
            self.scheduler.keep_drafted(state, num_right)
            if state.num_output_left == 0:
                self.scheduler.finish(state)
                self.finished[state.request_id] = state

    def _next_token(self, state: SequenceState) -> int:
        return next_token(prefix_identities(state.tokens(), state.namespace)[-1])


def make_engine(
    num_blocks: int,
    block_size: int = 4,
    *,
    max_num_seqs: int = 4,
    token_budget: int = 16,
    max_overtakes: int = 8,
    draft_tokens: int = 0,
    **others: Any,
) -> VirtualEngine:
    shares = others.pop("shares", True)
    cache = PrefixCache(num_blocks, block_size, **others)
    scheduler = Scheduler(
        cache,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=token_budget,
        max_overtakes=max_overtakes,
        shares=shares,
        drafting=Drafting(draft_tokens) if draft_tokens else None,
    )
    return VirtualEngine(cache, scheduler, max_num_seqs, token_budget)


def make_state(arrival: int, prompt: list[int], max_output: int, **others: Any) -> SequenceState:
    return SequenceState(f"r{arrival}", arrival, np.array(prompt, dtype=np.int32), max_output, **others)


def submit_all(engine: VirtualEngine, states: list[SequenceState]) -> list[SequenceState]:
    for state in states:
        engine.submit(state)
    return states


def run_to_end(engine: VirtualEngine, limit: int = 5_000) -> None:
    while engine.scheduler.has_requests:
        engine.step()
        assert engine.num_steps < limit, "requests do not finish"


def assert_all_right(engine: VirtualEngine, states: list[SequenceState]) -> None:
    """Every request ended once, with the tokens it gets alone, and holds nothing any more."""
    assert set(engine.finished) | engine.aborted == {state.request_id for state in states}
    for state in engine.finished.values():
        assert state.output == expected_output(state.prompt, state.namespace, state.max_output_tokens)
        if state.num_alternatives is not None:
            assert state.prompt_scores == expected_scores(state.prompt, state.namespace, state.num_alternatives)
    cache = engine.cache
    assert cache.num_pinned_blocks == 0
    assert cache.num_free_blocks + cache.num_cached_blocks == cache.num_blocks


def overtakes(engine: VirtualEngine) -> dict[str, int]:
    """For each request, how many younger ones were first admitted before it was."""
    first = {}
    for place, state in enumerate(engine.admissions):
        first.setdefault(state.request_id, (place, state.arrival))
    places = list(first.values())
    return {
        request_id: sum(1 for other_place, other_arrival in places if other_arrival > arrival and other_place < place)
        for request_id, (place, arrival) in first.items()
    }


def random_tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]
