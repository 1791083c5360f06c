"""Slow, obvious twins of the eviction policies: single blocks, and a search of all leaves for every victim."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from tests.cache.offline_twin import leading, paths

from caudex.cache.block_trace import BlockTrace


@dataclass
class Block:
    id: int
    depth: int
    parent: Block | None
    state: Any = None
    children: set[int] = field(default_factory=set)


class TwinPolicy(ABC):
    def __init__(self, capacity: int, tokens_per_block: int) -> None:
        self.capacity = capacity
        self.tokens_per_block = tokens_per_block

    @abstractmethod
    def touch(self, path: list[Block], serial: int, now: float) -> None:
        """A request ends; blocks that were new to it have no state."""

    @abstractmethod
    def victim(self, leaves: list[Block], cached: dict[int, Block]) -> Block: ...

    def settle(self, cached: dict[int, Block]) -> None:  # noqa: B027 (most have nothing to do)
        """What is cached has changed: after each eviction, and when a request has ended."""


class Ranked(TwinPolicy):
    """The leaf with the lowest key goes."""

    @abstractmethod
    def key(self, block: Block) -> tuple[Any, ...]: ...

    def victim(self, leaves: list[Block], cached: dict[int, Block]) -> Block:
        return min(leaves, key=self.key)


class Lru(Ranked):
    def touch(self, path: list[Block], serial: int, now: float) -> None:
        for block in path:
            block.state = serial

    def key(self, block: Block) -> tuple[Any, ...]:
        return (block.state,)


class Fifo(Ranked):
    def touch(self, path: list[Block], serial: int, now: float) -> None:
        for block in path:
            block.state = block.state or serial

    def key(self, block: Block) -> tuple[Any, ...]:
        return block.state, -block.depth


class Lfu(Ranked):
    def touch(self, path: list[Block], serial: int, now: float) -> None:
        for block in path:
            block.state = ((block.state or (0, 0))[0] + 1, serial)

    def key(self, block: Block) -> tuple[Any, ...]:
        return tuple(block.state)


class Tlru(Ranked):
    spare_tokens = 12

    def touch(self, path: list[Block], serial: int, now: float) -> None:
        needed = max(int(len(path) - self.spare_tokens / self.tokens_per_block), 0)
        for block in path:
            block.state = (serial, needed)

    def key(self, block: Block) -> tuple[Any, ...]:
        return block.depth + 1 <= block.state[1], block.state[0]


class Gdsf(Ranked):
    break_even = 20.0
    floor = 0.0

    def touch(self, path: list[Block], serial: int, now: float) -> None:
        for block in path:
            block.state = ((block.state or (0,))[0] + 1, serial, self.floor)

    def key(self, block: Block) -> tuple[Any, ...]:
        touches, last, floor = block.state
        return floor + touches * (1.0 + (block.depth + 1) * self.tokens_per_block / self.break_even), last

    def victim(self, leaves: list[Block], cached: dict[int, Block]) -> Block:
        block = super().victim(leaves, cached)
        self.floor = self.key(block)[0]
        return block


class Slru(TwinPolicy):
    """State: (is protected, place)."""

    clock = 0

    def touch(self, path: list[Block], serial: int, now: float) -> None:
        self.clock += 1
        for block in path:
            block.state = (block.state is not None, self.clock)

    def settle(self, cached: dict[int, Block]) -> None:
        while sum(block.state[0] for block in cached.values()) > 0.8 * self.capacity:
            oldest = min(block.state[1] for block in cached.values() if block.state[0])
            self.clock += 1
            for block in cached.values():
                if block.state == (True, oldest):
                    block.state = (False, self.clock)

    def victim(self, leaves: list[Block], cached: dict[int, Block]) -> Block:
        return min(leaves, key=lambda block: block.state)


class S3Fifo(TwinPolicy):
    """State: [is in the main queue, place, reuses]."""

    clock = 0

    def __init__(self, capacity: int, tokens_per_block: int) -> None:
        super().__init__(capacity, tokens_per_block)
        self.ghosts: deque[int | None] = deque(maxlen=capacity)  # the last ones that left; None: it came back

    def touch(self, path: list[Block], serial: int, now: float) -> None:
        self.clock += 1
        new = {block.id for block in path if block.state is None}
        back = new.intersection(self.ghosts)
        self.ghosts = deque((None if ghost in new else ghost for ghost in self.ghosts), self.capacity)
        for block in path:
            if block.state is None:
                block.state = (bool(back), self.clock, 0)
            else:
                main, place, reuses = block.state
                block.state = (main, place, min(reuses + 1, 3))

    def victim(self, leaves: list[Block], cached: dict[int, Block]) -> Block:
        while True:
            small = [block for block in leaves if not block.state[0]]
            main = [block for block in leaves if block.state[0]]
            num_small = sum(not block.state[0] for block in cached.values())
            from_small = bool(small) and (10 * num_small >= self.capacity or not main)
            leaf = min(small if from_small else main, key=lambda block: block.state[1])
            reuses = leaf.state[2]
            if reuses > (1 if from_small else 0):
                self.clock += 1
                move(leaf, (True, self.clock, 0 if from_small else reuses - 1))
                continue
            if from_small:
                self.ghosts.append(leaf.id)
            return leaf


class Arc(TwinPolicy):
    """State: (was touched again, place)."""

    target = 0.0

    def __init__(self, capacity: int, tokens_per_block: int) -> None:
        super().__init__(capacity, tokens_per_block)
        self.once: OrderedDict[int, None] = OrderedDict()
        self.often: OrderedDict[int, None] = OrderedDict()

    def touch(self, path: list[Block], serial: int, now: float) -> None:
        back = False
        for block in path:
            if block.state is not None:
                continue
            once, often = max(len(self.once), 1), max(len(self.often), 1)
            if self.once.pop(block.id, 0) is None:
                self.target = min(self.target + max(often / once, 1.0), self.capacity)
                back = True
            elif self.often.pop(block.id, 0) is None:
                self.target = max(self.target - max(once / often, 1.0), 0.0)
                back = True
        for block in path:
            block.state = (block.state is not None or back, serial)

    def settle(self, cached: dict[int, Block]) -> None:
        """The paper's bounds: c for the first list and its ghosts, 2c for all."""
        num_once = sum(not block.state[0] for block in cached.values())
        while self.once and num_once + len(self.once) > self.capacity:
            self.once.popitem(last=False)
        while self.often and len(cached) + len(self.once) + len(self.often) > 2 * self.capacity:
            self.often.popitem(last=False)

    def victim(self, leaves: list[Block], cached: dict[int, Block]) -> Block:
        once = [block for block in leaves if not block.state[0]]
        often = [block for block in leaves if block.state[0]]
        num_once = sum(not block.state[0] for block in cached.values())
        from_once = bool(once) and (num_once > self.target or not often)
        leaf = min(once if from_once else often, key=lambda block: block.state[1])
        (self.once if from_once else self.often)[leaf.id] = None
        return leaf


def move(leaf: Block, state: object) -> None:
    """Move the leaf and all that is treated like it: the only children above it that are in the same state."""
    old, block = leaf.state, leaf
    leaf.state = state
    while block.parent is not None and block.parent.state == old and len(block.parent.children) == 1:
        block = block.parent
        block.state = state


TWINS: dict[str, type[TwinPolicy]] = {
    "lru": Lru,
    "fifo": Fifo,
    "lfu": Lfu,
    "slru": Slru,
    "s3fifo": S3Fifo,
    "arc": Arc,
    "tlru:12": Tlru,
    "gdsf:20": Gdsf,
    "ttl": Lru,
    "priority": Lru,
}


def twin_hits(trace: BlockTrace, capacity: int, name: str) -> list[int]:
    """Blocks served to each request, and so, over enough requests, which blocks were evicted in which order."""
    policy = TWINS[name](capacity, trace.block_size)
    cached: dict[int, Block] = {}
    hits = []
    for serial, (ids, reusable) in enumerate(paths(trace), start=1):
        hits.append(leading(ids[:reusable], cached))
        kept = ids[:capacity]
        new = [block_id for block_id in kept if block_id not in cached]
        while len(cached) + len(new) > capacity:
            leaves = [block for block in cached.values() if not block.children and block.id not in kept]
            block = policy.victim(leaves, cached)
            del cached[block.id]
            if block.parent is not None:
                block.parent.children.discard(block.id)
            policy.settle(cached)
        parent = None
        for depth, block_id in enumerate(kept):
            if block_id not in cached:
                cached[block_id] = Block(block_id, depth, parent)
                if parent is not None:
                    parent.children.add(block_id)
            parent = cached[block_id]
        policy.touch([cached[block_id] for block_id in kept], serial, math.nan)
        policy.settle(cached)
    return hits
