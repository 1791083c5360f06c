"""The prefix cache once more: slow, obvious, and sharing no idea with the compiled one.

Every resident block is an entry in a dictionary, keyed by all tokens up to its end. A look-up compares the prompt with
every key. There is no tree, no node, no lock count: pinned is what a running request's table points to, and who goes
first is found by looking at everything. For policies whose choice is their own secret, the twin is told what went, and
insists that it was allowed to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Block:
    """A physical block. `key` is the namespace and the tokens up to its end, once it is matchable."""

    key: tuple[str, Tokens] | None = None
    last_unpinned: tuple[int, int] = (0, 0)  # event, depth from the end
    # What the requests did that ended with it on their path:
    born: int = 0  # the first of them
    last: int = 0
    touches: int = 0
    priority: float = -math.inf  # the highest
    expiry: float = -math.inf  # the latest


@dataclass(eq=False)
class Request:
    serial: int
    space: str
    tokens: Tokens
    table: list[Block]
    num_cached: int
    num_committed: int
    in_tree: int  # tokens whose blocks are shared through the index; what follows is private
    source: Block | None = None
    num_prompt: int = 0
    priority: float = 0.0
    expected_return: float = -1.0
    ends: bool = False
    is_pin: bool = False


def common(a: Tokens, b: Tokens) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@dataclass
class Twin:
    num_blocks: int
    block_size: int
    index: Literal["radix", "hash"]
    policy: str
    has_gone: Callable[[str, Tokens], bool]  # asked after the fact, for policies whose order is not in ORDERS
    pin_budget: int
    now: float = 0.0
    resident: dict[tuple[str, Tokens], Block] = field(default_factory=dict)
    running: list[Request] = field(default_factory=list)
    event: int = 0
    begun: int = 0
    stats: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))

    # ------------------------------------------------------------------------------------------------ looking

    def coverage(self, space: str, tokens: Tokens) -> int:
        """How many leading tokens are matchable."""
        if self.index == "hash":
            size = self.block_size
            n = 0
            while n + size <= len(tokens) and (space, tokens[: n + size]) in self.resident:
                n += size
            return n
        return max((common(key, tokens) for s, key in self.resident if s == space), default=0)

    def match(self, space: str, tokens: Tokens) -> int:
        return self.coverage(space, tokens[:-1])

    def sources(self, space: str, tokens: Tokens, num_cached: int) -> list[Block]:
        """The blocks from which the slots after the last whole block may be copied."""
        index = num_cached // self.block_size
        return [
            block
            for (s, key), block in self.resident.items()
            if s == space
            and (len(key) - 1) // self.block_size == index
            and common(key, tokens[:num_cached]) == num_cached
        ]

    def pinned(self) -> set[Block]:
        blocks: set[Block] = set()
        for request in self.running:
            blocks.update(request.table[: self.blocks_for(request.in_tree)])
            if request.source is not None:
                blocks.add(request.source)
        return blocks

    def private(self) -> int:
        return sum(len(r.table) - self.blocks_for(r.in_tree) for r in self.running)

    @property
    def num_cached(self) -> int:
        return len(set(self.resident.values()) - self.pinned())

    @property
    def num_free(self) -> int:
        return self.num_blocks - len(self.resident) - self.private()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------------------------------------------ requests

    def begin(self, space: str, tokens: Tokens, source: Block | None, *, is_resumed: bool = False) -> Request:
        self.begun += 1
        cached = self.match(space, tokens)
        whole = cached // self.block_size
        table = [self.resident[space, tokens[: (i + 1) * self.block_size]] for i in range(whole)]
        in_tree = whole * self.block_size
        request = Request(self.begun, space, tokens, table, cached, cached, in_tree, source, len(tokens))
        self.running.append(request)
        if is_resumed:
            self.stats["resumed_requests"] += 1
            self.stats["resumed_tokens"] += len(tokens)
            self.stats["resumed_hit_tokens"] += cached
            return request
        self.stats["requests"] += 1
        self.stats["lookup_tokens"] += len(tokens)
        self.stats["hit_whole_tokens"] += in_tree
        self.stats["hit_partial_tokens"] += cached - in_tree
        return request

    def num_to_pin(self, space: str, tokens: Tokens) -> int:
        return self.coverage(space, tokens) // self.block_size

    def may_pin(self, num_blocks: int) -> bool:
        return num_blocks <= self.pin_budget - sum(len(r.table) for r in self.running if r.is_pin)

    def pin(self, space: str, tokens: Tokens) -> Request:
        """Hold what is cached of these tokens, in whole blocks: a request that computes nothing and never ends."""
        self.begun += 1
        end = self.num_to_pin(space, tokens) * self.block_size
        table = [self.resident[space, tokens[: n + self.block_size]] for n in range(0, end, self.block_size)]
        pin = Request(self.begun, space, tokens[:end], table, end, end, end, is_pin=True)
        self.running.append(pin)
        return pin

    def pass_by(self, count: int) -> None:
        """So many requests of one token, each in a namespace of its own, that end before they compute anything."""
        self.begun += count
        self.stats["requests"] += count
        self.stats["lookup_tokens"] += count

    def missing(self, request: Request, num_tokens: int) -> int:
        return max(self.blocks_for(num_tokens) - len(request.table), 0)

    def fits(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free + self.num_cached

    def allocate(self, request: Request, num_tokens: int) -> None:
        missing = self.missing(request, num_tokens)
        if missing == 0:
            return
        self.make_room(missing)
        request.table.extend(Block() for _ in range(missing))
        if request.source is not None:
            self.let_go_of_source(request)

    def commit(self, request: Request, num_tokens: int) -> None:
        if num_tokens <= request.num_committed:
            return
        self.stats["committed_tokens"] += num_tokens - request.num_committed
        request.num_committed = num_tokens
        self.store(request)

    def store(self, request: Request) -> None:
        size = self.block_size
        end = request.num_committed
        if self.index == "hash":
            end -= end % size
        if request.source is not None or end <= request.in_tree:
            return
        tokens = request.tokens[:end]
        known = self.coverage(request.space, tokens)
        whole = known // size * size
        if whole > request.in_tree:
            for i in range(request.in_tree // size, whole // size):
                request.table[i] = self.resident[request.space, tokens[: (i + 1) * size]]
                self.stats["adopted_blocks"] += 1
            request.in_tree = whole
        if known < end and not self.must_wait(request, known):
            for i in range(known // size, self.blocks_for(end)):
                block = request.table[i]
                if block.key is not None:
                    del self.resident[block.key]
                block.key = (request.space, tokens[: (i + 1) * size])
                self.resident[block.key] = block
            request.in_tree = end
        self.drop_redundant()

    def must_wait(self, request: Request, known: int) -> bool:
        """Is our last block, where others have gone on from its middle, still to be copied by someone?"""
        size = self.block_size
        if request.in_tree % size == 0 or known // size != request.in_tree // size:
            return False
        last = request.table[known // size]
        assert last.key is not None
        return self.is_extended(last) and any(r.source is last for r in self.running)

    def missing_for_fork(self, parent: Request) -> int:
        if parent.source is not None:
            return 0
        return self.blocks_for(parent.num_committed) - parent.in_tree // self.block_size

    def fork(self, parent: Request) -> Request:
        shared = parent.in_tree // self.block_size
        missing = self.missing_for_fork(parent)
        self.begun += 1
        child = Request(
            self.begun,
            parent.space,
            parent.tokens,
            parent.table[:shared],
            parent.num_committed,
            parent.num_committed,
            shared * self.block_size,
            parent.source,
            parent.num_prompt,
            parent.priority,
            parent.expected_return,
            parent.ends,
        )
        self.running.append(child)
        self.make_room(missing)
        child.table.extend(Block() for _ in range(missing))
        return child

    def release(self, request: Request) -> None:
        self.store(request)
        in_tree = request.table[: self.blocks_for(request.in_tree)]
        if not request.is_pin:
            for block in in_tree:
                self.touch(block, request)
        if request.source is not None:
            self.let_go_of_source(request)
        self.running.remove(request)
        self.event += 1
        pinned = self.pinned()
        for depth, block in enumerate(in_tree):
            if block not in pinned:
                block.last_unpinned = (self.event, -depth)
        self.drop_redundant()

    def touch(self, block: Block, request: Request) -> None:
        block.born = block.born or request.serial
        block.last = request.serial
        block.touches += 1
        block.priority = max(block.priority, request.priority)
        if not request.ends:
            block.expiry = max(block.expiry, self.now + max(request.expected_return, 0.0))

    def let_go_of_source(self, request: Request) -> None:
        block, request.source = request.source, None
        assert block is not None
        self.event += 1
        if block not in self.pinned():
            block.last_unpinned = (self.event, 0)
        self.drop_redundant()

    def clear(self) -> None:
        while self.num_cached:
            self.evict(count=False)

    # ------------------------------------------------------------------------------------------------ eviction

    def make_room(self, count: int) -> None:
        assert self.fits(count)
        while self.num_free < count:
            self.evict()

    def evict(self, *, count: bool = True) -> None:
        pinned = self.pinned()
        candidates = [b for b in self.resident.values() if b not in pinned]
        if self.policy == "lru":
            victim = min(candidates, key=lambda b: b.last_unpinned)
        elif self.policy in ORDERS:
            victim = min((b for b in candidates if not self.has_child(b)), key=ORDERS[self.policy])
        else:
            gone = [b for b in candidates if b.key is not None and self.has_gone(*b.key)]
            victim = next(b for b in gone if not self.has_child(b))
        assert not self.has_child(victim), "a block goes before the blocks that build on it"
        assert victim.key is not None
        del self.resident[victim.key]
        if count:
            self.stats["evicted_blocks"] += 1
            self.stats["evicted_tokens"] += (len(victim.key[1]) - 1) % self.block_size + 1

    def has_child(self, block: Block) -> bool:
        """Does another block need this one as its prefix?"""
        assert block.key is not None
        return len(block.key[1]) % self.block_size == 0 and self.is_extended(block)

    def is_extended(self, block: Block) -> bool:
        assert block.key is not None
        space, key = block.key
        return any(s == space and len(k) > len(key) and k[: len(key)] == key for s, k in self.resident)

    def drop_redundant(self) -> None:
        """A partly filled block goes when a longer copy of it is there, unless a request still writes or copies it."""
        for block in list(self.resident.values()):
            assert block.key is not None
            partial = len(block.key[1]) % self.block_size != 0
            if not partial or not self.is_extended(block):
                continue
            in_use = any(
                r.source is block or (r.in_tree % self.block_size and r.table[r.in_tree // self.block_size] is block)
                for r in self.running
            )
            if not in_use:
                del self.resident[block.key]


ORDERS: dict[str, Callable[[Block], tuple[float, ...]]] = {
    "fifo": lambda block: (block.born,),
    "lfu": lambda block: (block.touches, block.last),
    "priority": lambda block: (block.priority, block.last),
    "ttl": lambda block: (block.expiry, block.last),
}
"""Policies by how they rank a block that none builds on; the lowest goes."""

COUNTERS = (
    "requests",
    "lookup_tokens",
    "hit_whole_tokens",
    "hit_partial_tokens",
    "committed_tokens",
    "adopted_blocks",
    "evicted_blocks",
    "evicted_tokens",
    "resumed_requests",
    "resumed_tokens",
    "resumed_hit_tokens",
)
