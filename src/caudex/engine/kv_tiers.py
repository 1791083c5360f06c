"""Blocks on their way between the pool and the tiers: written through when they are committed, fetched at admission."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from caudex.cache.namespace import split_namespace
from caudex.engine.kv_memory import KvMemory
from caudex.engine.sequence_state import SequenceState
from caudex.engine.step import BlockImport, Step
from caudex.tiers.block_format import BlockFormat
from caudex.tiers.keys import KeyChain, key_scope
from caudex.tiers.stack import HeldBlock, TierStack
from caudex.tiers.store import BlockStore
from caudex.tiers.tier import Tier
from caudex.tiers.tier_stats import TierStats

DEFAULT_LIMIT_SECONDS = 2.0
MAX_LIMIT_SECONDS = 10.0
FLUSH_SECONDS = 10.0
"""How long an engine that shuts down waits for its last blocks to be stored."""

_LEAST_MEASURED_TOKENS = 64


@dataclass(eq=False)
class Fetch:
    """What the tiers have of a prompt from block `start` on, as far as it has come.

    The fetching thread adds blocks; once `ended` is set, or the engine has given up waiting, nothing is added any more.
    """

    scope: bytes
    keys: Sequence[bytes]
    start: int
    until: float
    blocks: list[HeldBlock] = field(default_factory=list)
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, blocks: list[HeldBlock]) -> None:
        with self.lock:
            if not self.ended:
                self.blocks += blocks

    def end(self) -> None:
        with self.lock:
            self.ended = True


class KvTiers:
    """One engine's side of a `TierStack`. All methods but `stats` are for the engine's thread; none waits for a store.

    **Write-through.** After a step its requests' newly committed whole blocks are copied out of the pool, while those
    requests still pin them, and handed to each tier that is not known to have them.

    **Fetch.** Before a request is admitted whose prompt goes on past what the pool has, its next whole blocks are asked
    for on a thread of their own; meanwhile it waits outside of the queue. It comes back with the leading blocks that
    arrived, at the latest when computing them should have taken as long: a store at most doubles a prefill.
    `take_fetched` then has them written into the blocks that admission has allocated.

    Namespace, adapter and, unless tenants share everything, tenant are part of every key. Where tenants share some
    prefixes in the pool, by a list or by k-anonymity, each finds in the tiers what it has itself used before.
    """

    def __init__(
        self,
        stores: Iterable[BlockStore],
        memory: KvMemory,
        *,
        block_size: int,
        model: bytes,
        adapters: Mapping[str, str],
        tenants_share: bool,
    ) -> None:
        """
        Args:
            stores: in the order in which they are asked.
            memory: the engine's pool.
            block_size: its token slots a block.
            model: `kv_fingerprint` of the engine.
            adapters: a digest of each adapter by its name.
            tenants_share: whether all tenants of a namespace may find each other's blocks.
        """
        block_format = BlockFormat(block_size, memory.block_bytes)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._stack = TierStack([Tier(store, block_format) for store in stores], block_format)
        self._memory = memory
        self._block_size = block_size
        self._model = model
        self._adapters = adapters
        self._tenants_share = tenants_share
        self._on_fetched: Callable[[], None] = lambda: None
        self._fetching: dict[str, SequenceState] = {}
        self._jobs: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._fetch_all, name="caudex-kv-fetch", daemon=True)

    def start(self, on_fetched: Callable[[], None]) -> None:
        """Start fetching; `on_fetched` is called on the fetching thread whenever a fetch has ended."""
        self._on_fetched = on_fetched
        self._thread.start()

    @property
    def num_fetching(self) -> int:
        """Requests that wait for their blocks."""
        return len(self._fetching)

    @property
    def seconds_to_limit(self) -> float:
        """How long the first of the waiting requests goes on waiting at most."""
        untils = [state.fetch.until for state in self._fetching.values() if state.fetch is not None]
        return max(0.0, min(untils, default=0.0) - time.monotonic())

    def begin_fetch(self, state: SequenceState, num_cached: int) -> bool:
        """Ask for what follows the first `num_cached` tokens; False if there is nothing to wait for."""
        if state.fetch is not None or state.is_scoring:
            return False
        num_wanted = (state.num_tokens - 1) // self._block_size
        start = num_cached // self._block_size
        if num_wanted <= start:
            return False
        chain = self._extended_chain(state, num_wanted)
        limit = self._stack.seconds_to_compute(num_wanted - start) or DEFAULT_LIMIT_SECONDS
        until = time.monotonic() + min(limit, MAX_LIMIT_SECONDS)
        state.fetch = Fetch(chain.scope, chain.keys[:num_wanted], start, until)
        self.num_queried_tokens += (num_wanted - start) * self._block_size
        self._fetching[state.request_id] = state
        self._jobs.put(state.fetch)
        return True

    def abandon(self, request_id: str) -> bool:
        """Forget a request that waits for its blocks; False if it does not."""
        return self._fetching.pop(request_id, None) is not None

    def take_back(self) -> list[SequenceState]:
        """The requests whose fetch has ended, or has taken as long as it may; they wait no more."""
        now, back = time.monotonic(), list[SequenceState]()
        for state in list(self._fetching.values()):
            assert state.fetch is not None
            if state.fetch.ended or now >= state.fetch.until:
                state.fetch.end()
                back.append(self._fetching.pop(state.request_id))
        return back

    def take_fetched(self, state: SequenceState) -> list[BlockImport]:
        """Which fetched blocks are to be written where, for a request that has slots and computed its first tokens.

        They follow what is computed without a gap, a block in which that ends included.
        """
        fetch, first = state.fetch, state.num_computed // self._block_size
        if fetch is None or first < fetch.start:
            return []
        blocks, fetch.blocks = fetch.blocks[first - fetch.start :], []
        imports = [BlockImport(first + place, block.data) for place, block in enumerate(blocks)]
        self.num_hit_tokens += len(imports) * self._block_size
        return imports

    def write(self, step: Step) -> None:
        """Put a step's fetched blocks into the pool."""
        for state, imports in step.imports:
            for block in imports:
                self._memory.import_block(int(state.block_table[block.place]), block.data)

    def note_step(self, step: Step, seconds: float) -> None:
        """Learn from a step that has run how long computing takes, and offer what it has completed to the tiers."""
        num_prompt_tokens = sum(chunk.num_tokens for chunk in step.chunks if chunk.num_tokens > 1)
        if num_prompt_tokens >= _LEAST_MEASURED_TOKENS:
            self._stack.note_computed(num_prompt_tokens, seconds)
        for chunk in step.chunks:
            self._offer(chunk.state)

    def stats(self) -> tuple[TierStats, ...]:
        return self._stack.stats()

    def close(self) -> None:
        """Store what waits to be, for a bounded time, and let go of the stores."""
        self._jobs.put(None)
        self._thread.join(MAX_LIMIT_SECONDS)
        self._stack.close(FLUSH_SECONDS)
        self._on_fetched = _nobody_waits

    def _offer(self, state: SequenceState) -> None:
        num_full = state.num_committed // self._block_size
        start, state.num_offered = state.num_offered, max(num_full, state.num_offered)
        if num_full <= start:
            return
        chain, table = self._extended_chain(state, num_full), state.block_table
        self._stack.offer(
            chain.scope, chain.keys[:num_full], start, lambda place: self._memory.export_block(int(table[place]))
        )

    def _extended_chain(self, state: SequenceState, num_blocks: int) -> KeyChain:
        """The keys of a request's first blocks, those of `num_blocks` included."""
        if state.key_chain is None:
            salt, adapter = split_namespace(state.namespace)
            scope = key_scope(
                self._model,
                namespace=salt,
                adapter="" if adapter is None else self._adapters[adapter],
                tenant="" if self._tenants_share else state.tenant,
            )
            state.key_chain = KeyChain(scope, self._block_size)
        missing = state.token_slice(state.key_chain.num_tokens, num_blocks * self._block_size)
        state.key_chain.extend(missing)
        return state.key_chain

    def _fetch_all(self) -> None:
        """What the fetching thread does: one fetch after another, in the order in which they were asked for."""
        while (fetch := self._jobs.get()) is not None:
            skipped = self._stack.fetch(fetch.scope, fetch.keys, fetch.start, fetch.until, fetch.take)
            fetch.end()
            self._on_fetched()
            if self._jobs.empty():
                self._stack.measure(skipped, fetch.scope, fetch.keys)


def _nobody_waits() -> None:
    """Called in the place of an engine that has ended, which is then not kept from being let go of."""
