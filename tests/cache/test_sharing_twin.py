"""Who sees which prefix, against an account kept token by token.

The account knows of every cached prefix who has computed it since it was last evicted, or that everyone may see it. It
learns what has been evicted by looking with the eyes of somebody who could see it. Tokens are symbols here: a number,
or a place in a piece of content that stands where placeholders are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from caudex.cache import OutOfBlocks, PrefixCache, Sequence

Symbol = int | tuple[bytes, bool]
"""A token, or one of a content's: its key, and whether it is the first of its tokens."""
Symbols = tuple[Symbol, ...]
Tree = tuple[str, str]
"""A namespace, and the tenant where each has a tree of its own."""

EVERYONE = None
PLACEHOLDER = 1
TENANTS = ("", "a", "b", "c")


def piece(key: bytes, length: int) -> Symbols:
    return ((key, True), *[(key, False)] * (length - 1))


words = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple),
    st.builds(piece, st.sampled_from([b"cat", b"dog"]), st.integers(1, 3)),
)
prompts = st.lists(words, min_size=1, max_size=4).map(lambda parts: sum(parts, ()))
namespaces = st.sampled_from(["", "", "lora"])
tenants = st.sampled_from(TENANTS)


def spelled(symbols: Symbols) -> tuple[list[int], list[tuple[int, int, bytes]]]:
    """Return the tokens that a caller sends, and the ranges of their content."""
    tokens = [symbol if isinstance(symbol, int) else PLACEHOLDER for symbol in symbols]
    content: list[tuple[int, int, bytes]] = []
    for place, symbol in enumerate(symbols):
        if isinstance(symbol, int):
            continue
        key, is_first = symbol
        start = place if is_first else content.pop()[0]
        content.append((start, place + 1, key))
    return tokens, content


@dataclass(eq=False)
class Running:
    sequence: Sequence
    tree: Tree
    tenant: str
    symbols: Symbols
    num_public: int
    in_tree: int


class SharingMachine(RuleBasedStateMachine):
    index: ClassVar[Any]
    sharing: ClassVar[Any]

    @initialize(num_blocks=st.sampled_from([6, 12, 80]), block_size=st.integers(1, 4), k=st.integers(2, 3))
    def make(self, num_blocks: int, block_size: int, k: int) -> None:
        self.cache = PrefixCache(num_blocks, block_size, index=self.index, sharing=self.sharing, k=k)
        self.grain = block_size if self.index == "hash" else 1
        self.k = k
        self.audiences: dict[tuple[Tree, Symbols], frozenset[str] | None] = {}
        self.registered: list[tuple[Tree, Symbols]] = []
        self.running: list[Running] = []

    # ------------------------------------------------------------------------------------------------ the account

    def tree(self, namespace: str, tenant: str) -> Tree:
        return namespace, tenant if self.sharing == "isolated" else ""

    def known(self, tree: Tree, symbols: Symbols, viewer: str | None = None) -> int:
        """How many leading symbols are cached, and visible if anybody looks."""
        length = 0
        while length + self.grain <= len(symbols):
            entry = (tree, symbols[: length + self.grain])
            if entry not in self.audiences:
                break
            audience = self.audiences[entry]
            if viewer is not None and audience is not EVERYONE and viewer not in audience:
                break
            length += self.grain
        return length

    def public_length(self, tree: Tree, symbols: Symbols) -> int:
        shared = [
            next(
                (n for n, (x, y) in enumerate(zip(prefix, symbols, strict=False)) if x != y),
                min(len(prefix), len(symbols)),
            )
            for t, prefix in self.registered
            if t == tree
        ]
        longest = max(shared, default=0)
        return longest - longest % self.grain

    def audience(self, *tenants: str) -> frozenset[str] | None:
        open_to_all = self.sharing in ("isolated", "shared") or (
            self.sharing == "k_anonymous" and len(tenants) >= self.k
        )
        return EVERYONE if open_to_all else frozenset(tenants)

    def admit(self, tree: Tree, prefix: Symbols, tenant: str) -> None:
        audience = self.audiences[tree, prefix]
        if audience is not EVERYONE:
            self.audiences[tree, prefix] = self.audience(*(audience | {tenant}))

    def store(self, request: Running, num_tokens: int) -> None:
        num_tokens -= num_tokens % self.grain
        for end, is_public in ((min(num_tokens, request.num_public), True), (num_tokens, False)):
            if end <= request.in_tree:
                continue
            known = self.known(request.tree, request.symbols[:end])
            ends = range(self.grain, end + 1, self.grain)
            for prefix in (request.symbols[:n] for n in ends):
                if len(prefix) > known:
                    self.audiences[request.tree, prefix] = EVERYONE if is_public else self.audience(request.tenant)
                elif is_public and known > request.in_tree:
                    self.audiences[request.tree, prefix] = EVERYONE
                elif len(prefix) > request.in_tree:
                    self.admit(request.tree, prefix, request.tenant)
            size = self.cache.block_size
            request.in_tree = end if known < end else max(request.in_tree, end - end % size)

    def drop_what_has_gone(self) -> None:
        gone = [entry for entry, audience in self.audiences.items() if not self.is_found(*entry, audience)]
        for entry in gone:
            del self.audiences[entry]
        for tree, prefix in self.audiences:
            assert len(prefix) <= self.grain or (tree, prefix[: -self.grain]) in self.audiences, "prefix-closed"

    def is_found(self, tree: Tree, prefix: Symbols, audience: frozenset[str] | None) -> bool:
        viewer = tree[1] if audience is EVERYONE else min(audience)
        return self.look(tree[0], viewer, (*prefix, 9)) >= len(prefix)

    def look(self, namespace: str, tenant: str, symbols: Symbols) -> int:
        tokens, content = spelled(symbols)
        return self.cache.match(tokens, namespace, tenant=tenant, content=content).num_tokens

    # ------------------------------------------------------------------------------------------------ what happens

    @rule(symbols=prompts, namespace=namespaces, tenant=tenants)
    def begin(self, symbols: Symbols, namespace: str, tenant: str) -> None:
        tree = self.tree(namespace, tenant)
        tokens, content = spelled(symbols)
        sequence = self.cache.begin(tokens, namespace, tenant=tenant, content=content)
        cached = self.known(tree, symbols[:-1], tenant)
        assert sequence.num_cached_tokens == cached
        public = self.public_length(tree, symbols)
        request = Running(sequence, tree, tenant, symbols, public, cached - cached % self.cache.block_size)
        try:
            sequence.allocate(len(symbols))
        except OutOfBlocks:
            sequence.release()
            return
        self.running.append(request)
        self.drop_what_has_gone()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ends=st.booleans())
    def commit(self, data: st.DataObject, ends: bool) -> None:
        request = data.draw(st.sampled_from(self.running))
        done = request.sequence.num_committed_tokens
        reach = len(request.symbols) if ends else data.draw(st.integers(done, len(request.symbols)))
        request.sequence.commit(reach)
        self.store(request, reach)
        if ends:
            request.sequence.release()
            self.store(request, reach)
            self.running.remove(request)

    @precondition(lambda self: self.sharing == "public")
    @rule(prefix=st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), namespace=namespaces)
    def register(self, prefix: Symbols, namespace: str) -> None:
        self.cache.register_public(spelled(prefix)[0], namespace)
        tree = self.tree(namespace, "")
        self.registered.append((tree, prefix))
        for n in range(self.grain, self.known(tree, prefix) + 1, self.grain):
            self.audiences[tree, prefix[:n]] = EVERYONE

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.drop_what_has_gone()

    # ------------------------------------------------------------------------------------------------ what must hold

    @rule(symbols=prompts, namespace=namespaces, tenant=tenants)
    def anybody_looks(self, symbols: Symbols, namespace: str, tenant: str) -> None:
        expected = self.known(self.tree(namespace, tenant), symbols[:-1], tenant)
        assert self.look(namespace, tenant, symbols) == expected

    @invariant()
    def nobody_sees_more_or_less_than_the_account_says(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        for (namespace, owner), prefix in self.audiences:
            for tenant in TENANTS:
                expected = self.known(self.tree(namespace, tenant), prefix, tenant)
                if self.tree(namespace, tenant) == (namespace, owner):
                    assert self.look(namespace, tenant, (*prefix, 9)) == expected


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("sharing", ["isolated", "shared", "public", "k_anonymous"])
def test_everyone_sees_what_the_account_says(index: Any, sharing: Any) -> None:
    case = type("Machine", (SharingMachine,), {"index": index, "sharing": sharing})
    case.TestCase.settings = settings(
        max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case.TestCase().runTest()
