"""The policy "gittins" once more, as a policy in Python: no timers that fire, no queues by index, no tables.

It asks the tree for its shape, as any policy may, and keeps the rest in lists and dictionaries that are searched.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from caudex.cache import EndedRequest, Policy

BUCKETS = 64
BEGIN = [0.0, *(0.5 * math.exp2((bucket - 1) / 3.0) for bucket in range(1, BUCKETS + 1))]
WIDTH = [end - begin for begin, end in pairwise(BEGIN)]

Class = tuple[str | int, ...]
EVERYTHING: Class = ("everything",)
SUPERSEDED: Class = ("superseded",)
ENDED: Class = ("ended",)
Traits = tuple[int, int, int]


def class_of(touches: int, turn: int) -> Class:
    return ("turn", min(touches.bit_length() - 1, 15), min(turn.bit_length() - 1, 7))


def returning_in(seconds: float) -> Class:
    return ("returning", max(bucket for bucket in range(BUCKETS) if BEGIN[bucket] <= seconds))


def parent_of(c: Class) -> Class:
    return ("touches", c[1]) if c[0] == "turn" else EVERYTHING


def lineage(c: Class) -> list[Class]:
    return [c] if c == EVERYTHING else [c, *lineage(parent_of(c))]


def log4_bin(value: float) -> int:
    return 0 if value < 1.0 else min(1 + math.floor(math.log2(value)) // 2, 11)


class Rates:
    """What has been counted, and what follows from it since the last fit."""

    def __init__(self) -> None:
        self.reuses: dict[tuple[Class, int], float] = {}
        self.exposure: dict[tuple[Class, int], float] = {}
        self.observed: dict[tuple[int, int], float] = {}
        self.expected: dict[tuple[int, int], float] = {}
        self.fitted: dict[Class, list[float]] = {}

    def count_reuse(self, c: Class, traits: Traits, bucket: int, blocks: float, seconds: float) -> None:
        for k in lineage(c):
            self.reuses[k, bucket] = self.reuses.get((k, bucket), 0.0) + blocks
        for trait in enumerate(traits):
            self.observed[trait] = self.observed.get(trait, 0.0) + blocks
        self.count_exposure(c, traits, bucket, blocks * seconds)

    def count_exposure(self, c: Class, traits: Traits, bucket: int, block_seconds: float) -> None:
        for k in lineage(c):
            self.exposure[k, bucket] = self.exposure.get((k, bucket), 0.0) + block_seconds
        expected = self.of(c)[bucket] * block_seconds
        for trait in enumerate(traits):
            self.expected[trait] = self.expected.get(trait, 0.0) + expected

    def fit(self) -> None:
        self.fitted = {}

    def prior(self, c: Class) -> list[float]:
        if c == EVERYTHING:
            return [0.3 / max((BEGIN[b] + BEGIN[b + 1]) / 2, 0.25) for b in range(BUCKETS)]
        prior = list(self.of(parent_of(c)))
        if c == ENDED:
            prior = [rate / 100.0 for rate in prior]
        if c[0] == "returning":
            announced = int(c[1])
            prior = [rate / 10.0 if b < announced - 1 else rate for b, rate in enumerate(prior)]
            for b in range(max(announced - 1, 0), min(announced + 1, BUCKETS - 1) + 1):
                prior[b] = 1.0 / WIDTH[b]
        return prior

    def of(self, c: Class) -> list[float]:
        if c not in self.fitted:
            prior = self.prior(c)
            self.fitted[c] = [self.shrunk(c, prior, b) for b in range(BUCKETS)]
        return self.fitted[c]

    def shrunk(self, c: Class, prior: list[float], bucket: int) -> float:
        reuses = expected = 0.0
        for near in range(max(bucket - 4, 0), min(bucket + 4, BUCKETS - 1) + 1):
            weight = 0.5 ** abs(near - bucket)
            reuses += weight * self.reuses.get((c, near), 0.0)
            expected += weight * self.exposure.get((c, near), 0.0) * prior[near]
        return prior[bucket] * (4.0 + reuses) / (4.0 + expected)

    def risk_level(self, traits: Traits) -> int:
        risk = 1.0
        for trait in enumerate(traits):
            risk *= math.pow((4.0 + self.observed.get(trait, 0.0)) / (4.0 + self.expected.get(trait, 0.0)), 0.7)
        doubled = 2.0 * math.log2(risk)
        return min(max(8 + int(math.copysign(math.floor(abs(doubled) + 0.5), doubled)), 0), 15)

    def index(self, c: Class, risk_level: int, bucket: int) -> float:
        """The best ratio of hits to seconds held, over all times to give up at the end of a bucket."""
        risk = math.exp2((risk_level - 8) / 2.0)
        alive, held = 1.0, 0.0
        best = (0.0, 1.0)
        for b in range(bucket, BUCKETS):
            rate = self.of(c)[b] * risk
            survival = math.exp(-rate * WIDTH[b])
            held += alive * ((1.0 - survival) / rate if rate * WIDTH[b] > 1e-9 else WIDTH[b])
            alive *= survival
            if (1.0 - alive) * best[1] > best[0] * held:
                best = (1.0 - alive, held)
        return best[0] / best[1]


@dataclass(eq=False)
class Group:
    """What one request touched last."""

    touched: float
    turn: int
    known: int
    end: int
    origin: int


@dataclass(eq=False)
class Segment:
    """The blocks of a group in one node, evicted ones included."""

    group: Group
    touches: int
    reuse_class: Class
    traits: Traits
    risk: int
    weight: float
    bucket: int = 0
    node: int | None = None

    @property
    def queue(self) -> tuple[Class, int, int]:
        return self.reuse_class, self.risk, self.bucket


@dataclass
class Recall:
    end: int = 0
    touches: int = 0
    group: Group | None = None


class GittinsTwin(Policy):
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.rates = Rates()
        self.segment_of: dict[int, Segment] = {}
        self.by_age: list[list[Segment]] = [[] for _ in range(BUCKETS)]
        self.waiting: list[Segment] = []  # leaves, in the order in which they came to wait where they do
        self.strips: dict[tuple[Class, int], int] = {}  # numbered as they are met, which breaks ties
        self.index: dict[tuple[Class, int, int], float] = {}
        self.ghosts: deque[tuple[int, Segment] | None] = deque(maxlen=8 * num_blocks)
        self.num_requests = self.next_fit = 0
        self.time = -math.inf

    # ------------------------------------------------------------------------------------------------ the verbs

    def end_request(self, request: EndedRequest, path: list[int]) -> None:
        self.advance()
        self.num_requests += 1
        if self.num_requests >= self.next_fit:
            self.refit()
        path = path[::-1]
        recalls = [self.recall(node) for node in path]
        deepest = next((recall for recall in reversed(recalls) if recall.end > 0), Recall())
        num_known = sum(0 < recall.end == self.nodes.end(node) for node, recall in zip(path, recalls, strict=True))
        group, interval = self.follow(request, deepest)
        if 0 < num_known < len(path) and deepest.end == self.nodes.end(path[num_known - 1]):
            self.supersede_beside(path[num_known])
        traits = (
            log4_bin(max(request.num_tokens - deepest.end, 0)),
            log4_bin(request.num_output_tokens),
            0 if interval is None else log4_bin(4.0 * interval),
        )
        risk = self.rates.risk_level(traits)
        for node, recall in zip(path, recalls, strict=True):
            reuse_class = class_of(recall.touches + 1, group.turn)
            if self.nodes.start(node) >= group.origin:
                if request.hints.ends:
                    reuse_class = ENDED
                elif request.hints.expected_return >= 0.0:
                    reuse_class = returning_in(request.hints.expected_return)
            weight = np.float32(1.0) / np.sqrt(np.float32(max(self.nodes.num_blocks(node), 1)))
            self.detach(node)
            segment = Segment(group, recall.touches + 1, reuse_class, traits, risk, float(weight), node=node)
            self.segment_of[node] = segment
            self.by_age[0].append(segment)

    def offer(self, node: int) -> None:
        segment = self.segment_of.get(node)
        if segment is not None and self.nodes.is_leaf(node) and segment not in self.waiting:
            self.enqueue(segment)

    def withdraw(self, node: int) -> None:
        if node in self.segment_of:
            self.dequeue(self.segment_of[node])
        if not self.nodes.is_pinned(node):
            self.detach(node)

    def split(self, upper: int, lower: int) -> None:
        below = self.segment_of.get(lower)
        if below is None:
            return
        above = replace(below, node=upper)
        self.segment_of[upper] = above
        order = self.by_age[below.bucket]
        order.insert(order.index(below) + 1, above)

    def merge(self, upper: int, lower: int) -> bool:
        a, b = self.segment_of.get(upper), self.segment_of.get(lower)
        if a is None or b is None or a.group is not b.group or self.num_ghosts(a) > 0:
            return False
        if (a.reuse_class, a.touches) != (b.reuse_class, b.touches):
            return False
        self.detach(upper)
        return True

    def victim(self) -> int:
        self.advance()

        def rank(segment: Segment) -> tuple[float, int, int]:
            return self.index[segment.queue], self.strips[segment.queue[:2]], segment.bucket

        segment = min(self.waiting, key=rank)  # the first of equals
        node = segment.node
        assert node is not None
        if (
            self.nodes.num_blocks(node)
            == self.nodes.end(node) // self.block_size - self.nodes.start(node) // self.block_size
        ):
            self.ghosts.append((self.nodes.fingerprint(node), segment))
        return node

    # ------------------------------------------------------------------------------------------------ a request ends

    def recall(self, node: int) -> Recall:
        segment = self.segment_of.get(node)
        if segment is not None:
            self.count_reuse(segment, self.nodes.num_blocks(node))
            return Recall(self.nodes.end(node), segment.touches, segment.group)
        recall = Recall()
        for place, fingerprint in enumerate(self.nodes.fingerprints(node), self.nodes.start(node) // self.block_size):
            ghost = next((i for i, g in enumerate(self.ghosts) if g is not None and g[0] == fingerprint), None)
            if ghost is None:
                break
            entry = self.ghosts[ghost]
            assert entry is not None
            self.count_reuse(entry[1], 1.0)
            recall = Recall((place + 1) * self.block_size, entry[1].touches, entry[1].group)
            self.ghosts[ghost] = None
        return recall

    def count_reuse(self, segment: Segment, blocks: float) -> None:
        seconds = max(self.time - segment.group.touched - BEGIN[segment.bucket], 0.0)
        blocks *= segment.weight
        self.rates.count_reuse(segment.reuse_class, segment.traits, segment.bucket, blocks, seconds)

    def follow(self, request: EndedRequest, deepest: Recall) -> tuple[Group, float | None]:
        group = Group(self.time, 1, deepest.end, request.num_tokens, deepest.end)
        before = deepest.group
        if before is None:
            return group, None
        covered, new = deepest.end - before.known, before.end - before.known
        if (covered > 0 and 2 * covered >= new) or deepest.end + self.block_size >= before.end:
            group.turn, group.origin = before.turn + 1, before.origin
            return group, self.time - before.touched
        return group, None

    def supersede_beside(self, node: int) -> None:
        others = [other for other in self.nodes.children(self.nodes.parent(node)) if other != node]
        if len(others) != 1 or others[0] not in self.segment_of:
            return
        group = self.segment_of[others[0]].group
        while len(others) == 1:
            segment = self.segment_of.get(others[0])
            if segment is None or segment.group is not group:
                return
            was_waiting = self.dequeue(segment)
            segment.reuse_class = SUPERSEDED
            if was_waiting:
                self.enqueue(segment)
            others = self.nodes.children(others[0])

    # ------------------------------------------------------------------------------------------------ time passes

    def advance(self) -> None:
        if self.nodes.now <= self.time:
            return
        self.time = self.nodes.now
        for bucket in range(BUCKETS - 1):
            self.by_age[bucket] = [segment for segment in self.by_age[bucket] if self.is_remembered(segment)]
            while self.by_age[bucket] and self.by_age[bucket][0].group.touched + BEGIN[bucket + 1] <= self.time:
                segment = self.by_age[bucket].pop(0)
                blocks = self.num_ghosts(segment) + (0 if segment.node is None else self.nodes.num_blocks(segment.node))
                exposure = blocks * segment.weight * WIDTH[bucket]
                self.rates.count_exposure(segment.reuse_class, segment.traits, bucket, exposure)
                was_waiting = self.dequeue(segment)
                segment.bucket = bucket + 1
                self.by_age[bucket + 1].append(segment)
                if was_waiting:
                    self.enqueue(segment)

    def is_remembered(self, segment: Segment) -> bool:
        return segment.node is not None or self.num_ghosts(segment) > 0

    def num_ghosts(self, segment: Segment) -> int:
        return sum(ghost is not None and ghost[1] is segment for ghost in self.ghosts)

    def refit(self) -> None:
        self.next_fit = self.num_requests + min(max(self.num_requests // 16, 4), 64)
        self.rates.fit()
        self.index = {segment.queue: self.rates.index(*segment.queue) for segment in self.waiting}

    # ------------------------------------------------------------------------------------------------ who waits

    def enqueue(self, segment: Segment) -> None:
        if not any(other.queue == segment.queue for other in self.waiting):
            self.strips.setdefault(segment.queue[:2], len(self.strips))
            self.index[segment.queue] = self.rates.index(*segment.queue)
        self.waiting.append(segment)

    def dequeue(self, segment: Segment) -> bool:
        if segment not in self.waiting:
            return False
        self.waiting.remove(segment)
        return True

    def detach(self, node: int) -> None:
        segment = self.segment_of.pop(node, None)
        if segment is not None:
            self.dequeue(segment)
            segment.node = None
