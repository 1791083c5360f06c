"""The loop that serves requests, one step after another, on the engine's thread."""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeAlias

import numpy as np
from torch import Tensor

from caudex.cache import PrefixCache
from caudex.engine.grammar import GrammarError
from caudex.engine.kv_tiers import KvTiers
from caudex.engine.output_stream import OutputStream
from caudex.engine.runner import ModelRunner
from caudex.engine.sampling import SampledToken, accepted, sample, score
from caudex.engine.scheduler import Scheduler
from caudex.engine.sequence_state import SequenceState
from caudex.engine.step import ScheduledChunk, Step, copy_rows
from caudex.engine.types import EngineStats, FinishReason

_log = logging.getLogger(__name__)
_MAX_FAILURES_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class Submit:
    """Serve a request."""

    stream: OutputStream


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, if it is still there."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Forget all cached KV that no running request uses."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """See what the tiers have given; wakes a loop that waits for nothing else."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop once every request is finished; without `drain` they are aborted."""

    drain: bool


Command: TypeAlias = Submit | Abort | ResetCache | Fetched | Stop


class EngineLoop:
    """Takes commands, runs steps, gives outputs. Everything but `commands` and `stats` is its thread's own.

    A step: schedule -> copy blocks -> run the model -> sample -> give tokens to their streams -> let go of what ended.

    What `after_outputs` has is called between a step's outputs and the model's next run: the threads that it wakes then
    find the interpreter lock free for as long as that takes, and the step has been prepared without them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: PrefixCache,
        scheduler: Scheduler,
        on_finished: Callable[[str], None],
        *,
        check_invariants: bool,
        tiers: KvTiers | None = None,
    ) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.after_outputs: list[Callable[[], None]] = []
        self._runner = runner
        self._cache = cache
        self._scheduler = scheduler
        self._tiers = tiers
        self._awaits_tiers = False
        if tiers is not None:
            tiers.start(lambda: self.commands.put(Fetched()))
        self._on_finished = on_finished
        self._checks_invariants = check_invariants
        self._streams: dict[str, OutputStream] = {}
        self._stopping = False
        self._failures_in_a_row = 0
        self._num_generated_tokens = 0
        self._finished: Counter[FinishReason] = Counter()
        self.stats = self._collect_stats()

    def run(self) -> None:
        """Serve until told to stop. An exception that leaves here is fatal; `end_all` is then still to be called."""
        while not self._stopping or self._scheduler.has_requests:
            self._take_commands()
            self._scheduler.pins.release_expired()
            if self._scheduler.has_requests:
                self._step()
            elif self._checks_invariants:
                self.check_invariants()
            self.stats = self._collect_stats()

    def end_all(self, error: BaseException | None) -> None:
        """Give every request that is left its final output: `error` if something died, `abort` if not."""
        while not self.commands.empty():
            command = self.commands.get()
            if isinstance(command, Submit):
                self._streams[command.stream.request.request_id] = command.stream
        for stream in list(self._streams.values()):
            self._end(stream, "abort" if error is None else "error", None if error is None else repr(error))
        self._scheduler.pins.release_all()
        self.stats = self._collect_stats()
        self._call_after_outputs()

    def check_invariants(self) -> None:
        """Raise AssertionError if cache or scheduler are not what they should be."""
        self._cache.check_invariants()
        self._scheduler.check_invariants()
        in_use = self._scheduler.has_requests or len(self._scheduler.pins) > 0
        assert in_use or self._cache.num_pinned_blocks == 0, "blocks are pinned by nobody"

    def _take_commands(self) -> None:
        """Carry out what other threads asked for; wait for something if there is nothing else to do."""
        awaits_tiers = self._awaits_tiers and self._scheduler.num_fetching > 0
        idle = awaits_tiers or not (self._scheduler.has_requests or self._stopping)
        if idle:
            self._call_after_outputs()
        wait = self._seconds_to_wait() if idle else 0.0
        with suppress(queue.Empty):
            self._carry_out(self.commands.get(block=idle, timeout=wait))
            while True:
                self._carry_out(self.commands.get_nowait())

    def _seconds_to_wait(self) -> float | None:
        """How long to wait for a command when nothing can be computed; None is for ever."""
        if self._tiers is not None and self._tiers.num_fetching:
            return self._tiers.seconds_to_limit
        return self._scheduler.pins.seconds_to_next()

    def _carry_out(self, command: Command) -> None:
        match command:
            case Submit(stream):
                self._streams[stream.request.request_id] = stream
                stream.state.leader = self._leader(stream)
                self._scheduler.add(stream.state)
            case Abort(request_id):
                self._abort(request_id)
            case ResetCache():
                self._scheduler.pins.release_all()
                self._cache.clear()
            case Fetched():
                pass
            case Stop(drain):
                self._stopping = True
                for request_id in [] if drain else list(self._streams):
                    self._abort(request_id)

    def _leader(self, stream: OutputStream) -> SequenceState | None:
        """The request that this one branches off, if it is still there, and finds out all that this one asks for."""
        leader, state = self._streams.get(stream.request.sample_of or ""), stream.state
        if leader is None or not leader.state.same_cache(state):
            return None
        if state.num_alternatives not in (None, leader.state.num_alternatives):
            return None
        return leader.state if np.array_equal(leader.state.prompt, state.prompt) else None

    def _abort(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._scheduler.finish(stream.state)
            self._end(stream, "abort")

    def _step(self) -> None:
        step = self._scheduler.schedule()
        self._awaits_tiers = not step.chunks and self._scheduler.num_fetching > 0
        if not step.chunks:
            if not step.num_preempted and not self._awaits_tiers:
                self._fail_unservable()
            return
        try:
            sampled = self._compute(step)
        except Exception as error:
            self._fail(step, error)
            return
        self._failures_in_a_row = 0
        for stream, tokens in sampled:
            num_before = len(stream.state.output)
            self._push(stream, tokens)
            self._num_generated_tokens += len(stream.state.output) - num_before

    def _compute(self, step: Step) -> list[tuple[OutputStream, list[SampledToken]]]:
        """Run the model on a step's tokens, and sample for every request that is due a token."""
        if step.copies:
            self._runner.copy_blocks(copy_rows(step.copies))
        if self._tiers is not None:
            self._tiers.write(step)
        batch = step.batch()
        self._call_after_outputs()
        started = time.perf_counter()
        logits = self._runner.run(batch)
        seconds = time.perf_counter() - started
        if any(chunk.state.is_scoring for chunk in step.chunks):
            self._score_prompts(step, logits)
        self._scheduler.complete(step)
        if self._tiers is not None:
            self._tiers.note_step(step, seconds)
        if step.fork_copies:
            self._runner.copy_blocks(copy_rows(step.fork_copies))
        return self._sample(step, logits)

    def _sample(self, step: Step, logits: Tensor) -> list[tuple[OutputStream, list[SampledToken]]]:
        """The tokens of every request that is due one: of a draft, as many as came true and the one after them."""
        samplings = step.samplings()
        streams = [self._streams[sampling.state.request_id] for sampling in samplings]
        wishes = [stream.sampling_rows(sampling.draft) for stream, sampling in zip(streams, samplings, strict=True)]
        rows = [row for sampling in samplings for row in sampling.rows]
        tokens = iter(sample(logits if rows == list(range(len(logits))) else logits[rows], [*chain(*wishes)]))
        return [
            (stream, accepted(list(islice(tokens, len(sampling.rows))), sampling.draft))
            for stream, sampling in zip(streams, samplings, strict=True)
        ]

    def _call_after_outputs(self) -> None:
        for callback in self.after_outputs:
            callback()

    def _score_prompts(self, step: Step, logits: Tensor) -> None:
        """Score the tokens of the prompts that are to be."""
        for chunk, start, end in step.logit_spans():
            if chunk.state.is_scoring:
                self._score_chunk(chunk, logits[start:end])

    def _score_chunk(self, chunk: ScheduledChunk, logits: Tensor) -> None:
        """Each row of a chunk's logits scores the token after it; the last of a prompt's none."""
        state, first = chunk.state, chunk.start + 1
        targets = state.prompt[first : first + len(logits)]
        scores = score(logits[: len(targets)], targets, state.num_alternatives or 0)
        state.prompt_scores += scores
        self._scheduler.scores.keep(state.block_table, first, scores)

    def _push(self, stream: OutputStream, tokens: Sequence[SampledToken]) -> None:
        """Give a stream its tokens; an owner whose callback raises is gone, and its request is aborted."""
        try:
            num_taken = stream.push(tokens)
        except GrammarError as error:
            self._scheduler.finish(stream.state)
            grammar = stream.request.sampling.grammar
            self._end(stream, "error", str(error), grammar.origin if grammar else None)
            return
        except Exception:
            _log.exception("the output callback of request %s raised; aborting it", stream.request.request_id)
            self._abort(stream.request.request_id)
            return
        if num_taken > 1:
            self._scheduler.keep_drafted(stream.state, num_taken - 1)
        if stream.finish_reason is not None:
            self._scheduler.finish(stream.state)
            self._keep_session(stream)
            self._forget(stream, stream.finish_reason)

    def _keep_session(self, stream: OutputStream) -> None:
        """Do what a finished request asked for the pause until its conversation goes on."""
        request = stream.request
        session = request.session_id or request.request_id
        if request.cache_ttl > 0:
            self._scheduler.pins.keep(session, stream.state, request.cache_ttl)
        else:
            self._scheduler.pins.release(session)

    def _end(
        self, stream: OutputStream, reason: FinishReason, error: str | None = None, error_field: str | None = None
    ) -> None:
        """Final output of a request that the scheduler has let go of."""
        try:
            stream.end(reason, error, error_field)
        except Exception:
            _log.exception("the output callback of request %s raised", stream.request.request_id)
        self._forget(stream, reason)

    def _forget(self, stream: OutputStream, reason: FinishReason) -> None:
        del self._streams[stream.request.request_id]
        self._finished[reason] += 1
        self._on_finished(stream.request.request_id)

    def _fail(self, step: Step, error: Exception) -> None:
        """A step raised: its requests fail, and so does the engine if steps keep raising."""
        _log.error("a step of %d tokens failed", step.num_tokens, exc_info=error)
        self._failures_in_a_row += 1
        for state in self._scheduler.fail(step):
            self._end(self._streams[state.request_id], "error", f"{type(error).__name__}: {error}")
        if self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            raise error

    def _fail_unservable(self) -> None:
        """Nothing runs and nothing can start: the oldest request cannot be served at all."""
        state = next(iter(self._scheduler.waiting))
        self._scheduler.finish(state)
        self._end(self._streams[state.request_id], "error", "the KV pool cannot hold this request")

    def _collect_stats(self) -> EngineStats:
        return EngineStats(
            num_requests_running=len(self._scheduler.running),
            num_requests_waiting=len(self._scheduler.waiting) + self._scheduler.num_fetching + self.commands.qsize(),
            num_blocks=self._cache.num_blocks,
            num_free_blocks=self._cache.num_free_blocks,
            num_cached_blocks=self._cache.num_cached_blocks,
            num_pinned_blocks=self._cache.num_pinned_blocks,
            prefix_cache_queries=self._scheduler.num_queried_tokens,
            prefix_cache_hits=self._scheduler.num_hit_tokens,
            prompt_tokens=self._scheduler.num_queried_tokens,
            generation_tokens=self._num_generated_tokens,
            draft_tokens=self._scheduler.num_drafted_tokens,
            accepted_draft_tokens=self._scheduler.num_accepted_tokens,
            preemptions=self._scheduler.num_preemptions,
            requests_finished=dict(self._finished),
            tier_queries=0 if self._tiers is None else self._tiers.num_queried_tokens,
            tier_hits=0 if self._tiers is None else self._tiers.num_hit_tokens,
        )
