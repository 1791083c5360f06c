"""Decides, step by step, which tokens of which requests are computed. Pure Python: no model, no tensors."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from caudex.cache import BlockCopy, OutOfBlocks, PrefixCache, SessionHints
from caudex.engine.batch import Int32Array
from caudex.engine.drafting import Drafting
from caudex.engine.kv_tiers import KvTiers
from caudex.engine.prompt_scores import PromptScores
from caudex.engine.sequence_state import SequenceState
from caudex.engine.session_pins import SessionPins
from caudex.engine.step import ScheduledChunk, Step
from caudex.engine.waiting_queue import WaitingQueue

_LOOKUPS_A_STEP = 64
_CANDIDATES_A_STEP = 256
_MISFITS_A_STEP = 16


class OutputForecast:
    """How much of what running requests may still generate is set aside when another is admitted.

    Setting all of `max_tokens` aside leaves most of the pool idle, as most answers end early; setting nothing aside
    ends in preemptions. So a share of it is, which creeps down while all goes well and jumps up at a preemption, as
    SGLang does (Zheng et al., 2024).
    """

    FLOOR, START, DECAY, JUMP = 0.1, 0.5, 0.998, 0.2

    def __init__(self) -> None:
        self._share = self.START

    def blocks(self, state: SequenceState, block_size: int) -> int:
        """Blocks that `state` is expected to need beyond those for its tokens of now."""
        expected = math.ceil(self._share * state.num_output_left)
        return _num_blocks(state.num_tokens + expected, block_size) - _num_blocks(state.num_tokens, block_size)

    def note_step(self, preempted: bool) -> None:
        self._share = min(1.0, self._share + self.JUMP) if preempted else max(self.FLOOR, self._share * self.DECAY)


class Scheduler:
    """Continuous batching over a prefix cache.

    A step holds, in this order: one token of every decoding request; chunks of the prompts in prefill, oldest
    admission first; chunks of newly admitted requests, best first as `WaitingQueue` orders them; at most
    `max_num_batched_tokens` tokens and `max_num_seqs` requests in all.

    Admission allocates the slots of the whole prompt at once and leaves room for what running requests are expected to
    generate, so the pool is never over-committed. When decoding still finds it full, the request admitted last of the
    lowest priority is preempted: it releases its blocks, what it has computed stays cached until evicted, and it queues
    with its old rank.

    A prompt's chunk is committed when it is scheduled, so requests of one step share what one of them writes in it:
    every layer writes all keys and values before it attends. Two things guard that. A request whose match ends inside
    a block that is written in this very step waits one step, for the copy comes before the write. And if the step
    fails, `fail` drops whatever it had promised. Where a commit finds equal blocks of another request and adopts them,
    the step writes the same KV into them once more, which changes nothing.

    No prefix is computed twice side by side: a prompt in prefill takes all that is left of a step's budget, so nothing
    is admitted before its last chunk is scheduled, and by then whoever begins alike finds all of it. Should it end
    early, what it has computed is found.

    A further sample of a request waits for it in the same way and branches off in the step that ends their prompt: it
    shares all blocks, copies the last if the prompt ends inside it, and samples from the same logits. Where there is no
    room for that, or an older request is overdue, it is admitted later like any other.

    A prompt that is scored is computed from the first token on whose score is not known (see `PromptScores`). Scores
    are known once a step has run, not when it is scheduled, so a prompt that begins like one that is being scored waits
    for it, as long as that saves it at least one block. It cannot wait in vain: the other gets on at every step, or it
    is gone.

    Nothing is admitted in a step that has preempted: what was set aside has just proved too little, and the next step
    sets more aside. To fill the hole at once would evict what the victim has computed.

    Bounds: an admitted request advances at every step in which the older ones' prompts leave room in the budget; at
    most `max_overtakes` younger requests are admitted before a waiting one. Scheduling takes a millisecond or two
    a step however many wait: no more are looked at than the constants above say, the best first, then all in turn.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_overtakes: int,
        shares: bool = True,
        tiers: KvTiers | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self._max_num_seqs = max_num_seqs
        self._token_budget = max_num_batched_tokens
        self._shares = shares
        self._tiers = tiers
        self._drafting = drafting
        self._forecast = OutputForecast()
        self._written: set[int] = set()
        self._held: NDArray[np.bool] = np.zeros(cache.num_blocks, dtype=np.bool)
        self._num_expected = 0
        self._has_made_room = False
        self.scores = PromptScores(cache.num_blocks, cache.block_size)
        self.waiting = WaitingQueue(max_overtakes)
        self.pins = SessionPins(cache)
        self.running: list[SequenceState] = []
        self.num_preemptions = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0

    @property
    def num_fetching(self) -> int:
        """Requests that wait outside of the queue for what the tiers have of them."""
        return 0 if self._tiers is None else self._tiers.num_fetching

    @property
    def has_requests(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0 or self.num_fetching > 0

    def add(self, state: SequenceState) -> None:
        """Queue a new request."""
        self.waiting.add(state)
        if state.leader is not None:
            state.leader.samples.append(state)

    def finish(self, state: SequenceState) -> None:
        """Let go of a request, waiting or running; what it has computed stays cached."""
        if self._tiers is not None and self._tiers.abandon(state.request_id):
            return
        if state.sequence is None:
            self.waiting.remove(state.request_id)
            return
        self.running.remove(state)
        self._release(state, keep=True)
        self._has_made_room = True

    def fail(self, step: Step) -> list[SequenceState]:
        """Let go of every request of a step that raised, and of all cached KV, as some of it was never written."""
        failed = [*(chunk.state for chunk in step.chunks), *(state for _, state in step.forks)]
        for state in failed:
            self.running.remove(state)
            self._release(state, keep=False)
        self._cache.clear()
        self._has_made_room = True
        return failed

    def schedule(self) -> Step:
        """Choose the tokens of the next step; their slots are allocated when this returns."""
        step = Step()
        self._written.clear()
        for state in [] if self._tiers is None else self._tiers.take_back():
            self.waiting.add(state)
        self._extend_decoding(step)
        for state in sorted(self.running, key=lambda state: state.in_prefill):
            self._schedule_chunk(step, state)
        if len(self.waiting):
            self._survey_running()
            if not step.num_preempted and self._has_room(step):
                self._admit_waiting(step)
        if not step.num_preempted:
            self._add_drafts(step)
        self._forecast.note_step(preempted=step.num_preempted > 0)
        return step

    def complete(self, step: Step) -> None:
        """Note that a step's KV is written: full blocks of generated tokens can be matched from now on.

        Further samples of requests whose prompt ends in this step branch off, and join `step.forks`.
        """
        if not self._shares:
            return
        self._fork_samples(step)
        states = [chunk.state for chunk in step.chunks]
        full = [state for state in states if state.num_computed - state.num_committed >= self._block_size]
        if full:
            self._cache.commit_all([state.running_sequence() for state in full])
        for state in full:
            self._note_commit(state)

    def _extend_decoding(self, step: Step) -> None:
        """Give every newly generated token a slot, preempting until they fit."""
        while True:
            grown = [state for state in self.running if state.num_allocated < state.num_tokens]
            if not grown:
                return
            try:
                copies = self._cache.append_and_allocate(
                    [state.running_sequence() for state in grown], [state.output[-1] for state in grown]
                )
            except OutOfBlocks:
                self._make_room(step)
                continue
            step.copies.extend(copies)
            for state in grown:
                state.num_allocated += 1
                num_held = len(state.block_table)
                state.block_table = state.running_sequence().block_table
                self.scores.forget(state.block_table[num_held:])
            return

    def _make_room(self, step: Step) -> None:
        """Preempt a request; the last one that runs gets the blocks of kept sessions instead."""
        if len(self.running) == 1 and len(self.pins):
            self.pins.release_all()
        else:
            self._preempt_one(step)

    def _preempt_one(self, step: Step) -> None:
        victim = max(self.running, key=lambda state: (state.priority, state.arrival))
        self.running.remove(victim)
        self._release(victim, keep=True)
        self._has_made_room = True
        victim.num_preemptions += 1
        victim.fetch = None
        self.waiting.add(victim)
        self.num_preemptions += 1
        step.num_preempted += 1

    def _schedule_chunk(self, step: Step, state: SequenceState) -> None:
        start = state.num_computed
        end = min(state.num_tokens, start + self._token_budget - step.num_tokens)
        if end == start:
            return
        reads = state.in_prefill or start < len(state.prompt)
        state.num_computed = end
        if reads and self._shares:
            self._commit(state)
            blocks = state.block_table[start // self._block_size : _num_blocks(end, self._block_size)]
            self._written.update(blocks.tolist())
            if end == state.num_tokens:
                self.waiting.mark_group(state)
        step.add(ScheduledChunk(state, start, end, samples=end == state.num_tokens))

    def _add_drafts(self, step: Step) -> None:
        """Let decoding requests try their guesses, in what everything else has left of the step."""
        if self._drafting is None:
            return
        for place, guess in self._drafting.choose(step, self._token_budget - step.num_tokens):
            draft = guess[: self._draft_slots(step.chunks[place].state, len(guess))]
            if draft:
                step.add_draft(place, draft)
                self.num_drafted_tokens += len(draft)

    def _draft_slots(self, state: SequenceState, wanted: int) -> int:
        """How many of `wanted` slots behind its tokens a request has, or may take.

        It takes a block a few tokens early, and only while nobody waits for one and every request could take another.
        """
        held = len(state.block_table)
        missing = _num_blocks(state.num_tokens + wanted, self._block_size) - held
        if missing > 0 and not len(self.waiting) and self._cache.num_available_blocks >= missing + len(self.running):
            sequence = state.running_sequence()
            sequence.allocate(state.num_tokens + wanted)
            state.block_table = sequence.block_table
            self.scores.forget(state.block_table[held:])
        return min(wanted, len(state.block_table) * self._block_size - state.num_tokens)

    def keep_drafted(self, state: SequenceState, count: int) -> None:
        """Note that the first `count` tokens of a request's draft were right: their KV is that of its output."""
        end = state.num_computed + count
        state.running_sequence().append(state.token_slice(state.num_computed, end))
        state.num_computed = state.num_allocated = end
        self.num_accepted_tokens += count

    def _commit(self, state: SequenceState) -> None:
        state.running_sequence().commit(state.num_computed)
        self._note_commit(state)

    def _note_commit(self, state: SequenceState) -> None:
        state.num_committed = max(state.num_committed, state.num_computed)
        state.block_table = state.running_sequence().block_table

    def _release(self, state: SequenceState, *, keep: bool) -> None:
        sequence = state.running_sequence()
        if keep and self._shares and state.num_computed > state.num_committed:
            sequence.commit(state.num_computed)
        sequence.release()
        state.sequence = None
        state.num_computed = state.num_committed = state.num_allocated = 0

    def _fork_samples(self, step: Step) -> None:
        """Let waiting samples of the requests whose prompts this step completed branch off."""
        for chunk in step.chunks:
            leader = chunk.state
            if not chunk.samples or leader.output:
                continue
            for state in leader.samples:
                if self._may_fork(state) and self._fork(step, leader, state):
                    step.forks.append((chunk, state))

    def _may_fork(self, state: SequenceState) -> bool:
        """Whether `state` waits, has said nothing yet (it may have run before, and given way), and has its turn."""
        if state.request_id not in self.waiting or state.output:
            return False
        return len(self.running) < self._max_num_seqs and not self.waiting.has_better(state) and self._fits(state, 1)

    def _fork(self, step: Step, leader: SequenceState, state: SequenceState) -> bool:
        """Admit a waiting sample of `leader`'s prompt with all that is computed of it; False if the pool is full."""
        self._commit(leader)
        try:
            sequence = leader.running_sequence().fork()
        except OutOfBlocks:
            return False
        copies = sequence.allocate(state.num_tokens)
        state.sequence = sequence
        state.num_computed = state.num_committed = state.num_allocated = leader.num_computed
        state.block_table = sequence.block_table
        state.prompt_scores = list(leader.prompt_scores)
        self.scores.forget(state.block_table[leader.num_computed // self._block_size :])
        self.scores.copy(copies)
        step.fork_copies.extend(copies)
        self.waiting.admit(state.request_id)
        self._note_running(state)
        state.num_cached = leader.num_cached
        return True

    def _admit_waiting(self, step: Step) -> None:
        self.waiting.begin_step()
        if self._has_made_room or not self.running:
            self.waiting.end_skips()
            self._has_made_room = False
        self._refresh_shares()
        num_misfits = 0
        for _ in range(_CANDIDATES_A_STEP):
            state_or_none = self.waiting.best() if self._has_room(step) else None
            if state_or_none is None:
                return
            state = state_or_none
            expected_share = self.waiting.share(state)
            num_cached, num_blocks = self._look_up(state)
            if self.waiting.share(state) < expected_share:
                continue
            may_start = self._may_start(state, num_cached)
            if may_start and self._begin_fetch(state, num_cached, num_blocks):
                continue
            if may_start and self._start(step, state, num_blocks):
                self._schedule_chunk(step, state)
                continue
            self.waiting.skip(state)
            num_misfits += 1
            if num_misfits == _MISFITS_A_STEP:
                return

    def _refresh_shares(self) -> None:
        """Look up again what is cached of the requests whose turn it is, one call a namespace and tenant."""
        alike: defaultdict[tuple[str, str], list[SequenceState]] = defaultdict(list)
        for state in self.waiting.stale(_LOOKUPS_A_STEP):
            alike[state.namespace, state.tenant].append(state)
        for (namespace, tenant), states in alike.items():
            counts = self._cache.count_cached([*(state.tokens() for state in states)], namespace, tenant=tenant)
            for state, count in zip(states, counts.tolist(), strict=True):
                self.waiting.set_share(state, count / state.num_tokens)

    def _has_room(self, step: Step) -> bool:
        num_slots = self._max_num_seqs - len(self.running) - self.num_fetching
        return num_slots > 0 and step.num_tokens < self._token_budget

    def _begin_fetch(self, state: SequenceState, num_cached: int, num_blocks: int) -> bool:
        """Let a request that could be admitted now wait outside of the queue for what the tiers have of it."""
        if self._tiers is None or not self._fits(state, num_blocks) or not self._tiers.begin_fetch(state, num_cached):
            return False
        self.waiting.remove(state.request_id)
        return True

    def _look_up(self, state: SequenceState) -> tuple[int, int]:
        """Refresh a waiting request's share; gives the tokens it would hit and the free blocks it would take."""
        tokens = state.tokens()
        match = self._cache.match(tokens, state.namespace, tenant=state.tenant)
        self.waiting.set_share(state, match.num_tokens / len(tokens))
        num_useful = match.num_tokens
        if state.is_scoring:
            num_useful = self.scores.count(match.blocks, match.num_whole, state.num_alternatives or 0)
        return num_useful, _num_blocks(len(tokens), self._block_size) - int(self._held[match.blocks].sum())

    def _survey_running(self) -> None:
        """Note the blocks that running requests and kept sessions hold, and how many more the former will need."""
        self._held[:] = False
        for blocks in (*(state.block_table for state in self.running), *self.pins.blocks()):
            self._held[blocks] = True
        self._num_expected = sum(self._forecast.blocks(state, self._block_size) for state in self.running)

    def _note_running(self, state: SequenceState) -> None:
        self.running.append(state)
        self._held[state.block_table] = True
        self._num_expected += self._forecast.blocks(state, self._block_size)

    def _may_start(self, state: SequenceState, num_cached: int) -> bool:
        if self.waiting.is_overdue(state):
            return True
        if state.awaits_leader and self._shares:
            return False
        return not self._awaits_scores(state, num_cached)

    def _awaits_scores(self, state: SequenceState, num_known: int) -> bool:
        """Whether a running request is about to find at least a block of the scores that `state` would have to find."""
        return (
            self._shares
            and state.is_scoring
            and any(
                self._num_to_come(state, other) - num_known >= self._block_size
                for other in self.running
                if other.scores_for(state)
            )
        )

    def _num_to_come(self, state: SequenceState, other: SequenceState) -> int:
        """Leading tokens of `state` that `other` will have scored, or 0 if it has scored them all already."""
        common = min(_common_length(state.prompt, other.prompt), len(state.prompt) - 1)
        return common if common > len(other.prompt_scores) + 1 else 0

    def _start(self, step: Step, state: SequenceState, num_blocks: int) -> bool:
        """Pin what is cached of a waiting request and allocate the rest; False and no change if it has to wait."""
        if not self._fits(state, num_blocks):
            return False
        copies = self._begin(state)
        if copies is None and not self.running:
            self.pins.release_all()
            self._cache.clear()
            copies = self._begin(state)
        if copies is None:
            return False
        if any(copy.src in self._written for copy in copies):
            self._release(state, keep=False)
            return False
        step.copies.extend(copies)
        self._take_fetched(step, state)
        self._note_admission(state)
        return True

    def _take_fetched(self, step: Step, state: SequenceState) -> None:
        """Have what the tiers gave written after what the pool had; committed like a chunk, before it is written."""
        imports = [] if self._tiers is None else self._tiers.take_fetched(state)
        if not imports:
            return
        state.num_computed = (imports[-1].place + 1) * self._block_size
        self._commit(state)
        self._written.update(state.block_table[imports[0].place : imports[-1].place + 1].tolist())
        step.imports.append((state, imports))

    def _fits(self, state: SequenceState, num_blocks: int) -> bool:
        """Whether the pool has `num_blocks` besides what running requests are expected to need; alone, all of it."""
        if not self.running:
            return True
        expected = self._num_expected + self._forecast.blocks(state, self._block_size)
        return num_blocks + expected <= self._cache.num_available_blocks

    def _begin(self, state: SequenceState) -> list[BlockCopy] | None:
        tokens = state.tokens()
        begin = self._cache.resume if state.num_preemptions else self._cache.begin
        sequence = begin(tokens, state.namespace, tenant=state.tenant, hints=_session_hints(state))
        try:
            copies = sequence.allocate(len(tokens))
        except OutOfBlocks:
            sequence.release()
            return None
        state.sequence = sequence
        state.num_allocated = len(tokens)
        state.num_committed = sequence.num_cached_tokens
        state.block_table = sequence.block_table
        self.scores.forget(state.block_table[state.num_committed // self._block_size :])
        self.scores.copy(copies)
        state.num_computed = self._num_scored(state) if state.is_scoring else state.num_committed
        return copies

    def _num_scored(self, state: SequenceState) -> int:
        """Take the known scores of a prompt's beginning; computing begins at the last token that has one."""
        state.prompt_scores = self.scores.find(
            state.block_table, state.num_committed, state.prompt, state.num_alternatives or 0
        )
        return len(state.prompt_scores)

    def _note_admission(self, state: SequenceState) -> None:
        self.waiting.admit(state.request_id)
        self._note_running(state)
        if state.num_cached is None:
            state.num_cached = state.num_computed
            self.num_queried_tokens += len(state.prompt)
            self.num_hit_tokens += state.num_cached

    def check_invariants(self) -> None:
        """Raise AssertionError if a request is lost, counted twice, or holds what it should not."""
        self.waiting.check_invariants()
        assert len({state.request_id for state in self.running}) == len(self.running) <= self._max_num_seqs
        for state in self.running:
            assert state.sequence is not None
            assert state.request_id not in self.waiting
            assert state.num_computed <= state.num_allocated <= state.num_tokens
            assert state.num_committed <= state.num_computed or state.is_scoring
            assert len(state.block_table) >= _num_blocks(state.num_allocated, self._block_size)
        for state in self.waiting:
            assert state.sequence is None


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _common_length(left: Int32Array, right: Int32Array) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def _session_hints(state: SequenceState) -> SessionHints | None:
    """What the eviction policy is told about a request's conversation."""
    if state.session_id is None:
        return None
    digest = hashlib.blake2b(state.session_id.encode(), digest_size=8).digest()
    return SessionHints(session=int.from_bytes(digest, "little") or 1)
