from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.block_traces import block_traces, excerpt
from tests.cache.offline_twin import clairvoyant_hits, lru_hits, paths

from caudex.cache import EndedRequest, Policy, PrefixCache, policy_names
from caudex.cache.block_trace import BlockTrace
from caudex.cache.replay import ReplaySettings, replay
from caudex.cache.token_trace import TokenTrace

EXAMPLES = Path(__file__).parents[2] / "examples"


@st.composite
def token_traces(draw: st.DrawFn) -> TokenTrace:
    """Draw requests that share prefixes because few tokens exist, with outputs."""
    requests = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=20))
    prompts = [draw(st.integers(1, len(request))) for request in requests]
    tokens = np.array([token for request in requests for token in request], dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(request) for request in requests], dtype=np.int64)])
    return TokenTrace(tokens, offsets, np.array(prompts, dtype=np.int64))


@settings(deadline=None, max_examples=50)
@given(block_traces(), st.integers(1, 40))
def test_lru_serves_every_request_as_the_twin_does(trace: BlockTrace, capacity: int) -> None:
    (result,) = replay(trace, [ReplaySettings(capacity)])
    assert (result.hit_tokens // trace.block_size).tolist() == lru_hits(trace, capacity)


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_lru_on_a_real_trace(index: str) -> None:
    trace = excerpt("mooncake_conversation.head")
    settings = [ReplaySettings(capacity, index=index) for capacity in (500, 2000, 8000)]  # type: ignore[arg-type]
    for result in replay(trace, settings, max_threads=2):
        expected = lru_hits(trace, result.settings.num_blocks)
        assert (result.hit_tokens // trace.block_size).tolist() == expected


@settings(deadline=None, max_examples=30)
@given(block_traces(), st.integers(1, 40), st.sampled_from(policy_names()))
def test_no_policy_beats_the_clairvoyant_one(trace: BlockTrace, capacity: int, policy: str) -> None:
    (result,) = replay(trace, [ReplaySettings(capacity, policy=policy)])
    if max((len(ids) for ids, _ in paths(trace)), default=0) <= capacity:
        assert result.hit_tokens.sum() <= sum(clairvoyant_hits(trace, capacity)) * trace.block_size
    distinct = {block for ids, _ in paths(trace) for block in ids}
    assert result.num_cached_blocks <= min(capacity, len(distinct))


@settings(deadline=None, max_examples=50)
@given(token_traces(), st.integers(3, 30), st.integers(1, 4), st.sampled_from(["radix", "hash"]))
def test_tokens_take_the_way_of_a_served_request(trace: TokenTrace, num_blocks: int, size: int, index: str) -> None:
    num_blocks += 12 // size
    (result,) = replay(trace, [ReplaySettings(num_blocks, index=index, block_size=size)])  # type: ignore[arg-type]
    cache = PrefixCache(num_blocks, size, index=index, policy="lru")  # type: ignore[arg-type]
    for i, prompt in enumerate(trace.prompt_lengths.tolist()):
        tokens = trace.tokens[trace.offsets[i] : trace.offsets[i + 1]]
        sequence = cache.begin(tokens[:prompt])
        assert sequence.num_cached_tokens == result.hit_tokens[i]
        sequence.append(tokens[prompt:])
        written = len(tokens) - (len(tokens) > prompt)
        sequence.allocate(written)
        sequence.commit(written)
        sequence.release()
    assert cache.stats().evicted_blocks == result.evicted_blocks
    assert cache.num_cached_blocks == result.num_cached_blocks


def test_tenants_can_be_kept_apart() -> None:
    trace = BlockTrace.from_paths([[1, 2], [1, 2], [1, 2]], [9, 9, 9], 4, tenants=[0, 1, 0])
    shared, apart = replay(trace, [ReplaySettings(10), ReplaySettings(10, sharing="isolated")])
    assert shared.hit_tokens.tolist() == [0, 8, 8]
    assert apart.hit_tokens.tolist() == [0, 0, 8]


def test_ids_of_any_size_are_told_apart() -> None:
    large = BlockTrace.from_paths([[2**40, -7], [2**40, -7], [2**40 + 1]], [9, 9, 5], 4)
    (result,) = replay(large, [ReplaySettings(10)])
    assert result.hit_tokens.tolist() == [0, 8, 0]


def test_progress_covers_all_settings() -> None:
    trace = excerpt("mooncake_synthetic.head")
    seen: list[tuple[int, int]] = []
    replay(trace, [ReplaySettings(100), ReplaySettings(200)], progress=lambda *args: seen.append(args))
    assert seen[-1] == (1200, 1200)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_error_in_the_callback_stops_all_runs() -> None:
    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(excerpt("mooncake_synthetic.head"), [ReplaySettings(100), ReplaySettings(200)], progress=fail)


class Listener(Policy):
    """Keeps what requests say of their sessions; evicts nothing."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, float, bool, float]] = []

    def end_request(self, request: EndedRequest, path: list[int]) -> None:
        hints = request.hints
        self.heard.append((hints.session, hints.expected_return, hints.ends, hints.priority))

    def offer(self, node: int) -> None: ...
    def withdraw(self, node: int) -> None: ...
    def split(self, upper: int, lower: int) -> None: ...
    def merge(self, upper: int, lower: int) -> bool:
        return False

    def victim(self) -> int:
        raise AssertionError("nothing is to be evicted")


HINTS = {
    "sessions": [0, 7, -1],
    "expected_returns": [2.5, -1.0, 0.0],
    "session_ends": [False, True, False],
    "priorities": [0.0, 1.0, -2.0],
}


@pytest.mark.parametrize("kind", ["blocks", "tokens"])
def test_what_is_known_of_sessions_reaches_the_policy(kind: str) -> None:
    trace: BlockTrace | TokenTrace = BlockTrace.from_paths([[1], [1, 2], [3]], [5, 9, 4], 4, **HINTS)
    if kind == "tokens":
        trace = TokenTrace(np.array([1, 1, 2]), np.array([0, 1, 2, 3]), np.array([1, 1, 1]), **HINTS)  # type: ignore[arg-type]
    listener = Listener()
    replay(trace, [ReplaySettings(10, policy=listener)])
    assert [hints[0] != 0 for hints in listener.heard] == [True, True, False]
    assert listener.heard[0][0] != listener.heard[1][0]
    assert [hints[1:] for hints in listener.heard] == [(2.5, False, 0.0), (-1.0, True, 1.0), (0.0, False, -2.0)]


def test_a_session_that_ends_goes_first() -> None:
    """The same log, with the end of the first session foretold: its blocks make room before the second session's."""
    paths, lengths = [[1, 2], [3, 4], [5], [1, 2], [3, 4]], [9, 9, 5, 9, 9]
    ends = [False, True, False, False, False]
    (blind,) = replay(BlockTrace.from_paths(paths, lengths, 4), [ReplaySettings(4, policy="ttl:1000")])
    (told,) = replay(
        BlockTrace.from_paths(paths, lengths, 4, session_ends=ends), [ReplaySettings(4, policy="ttl:1000")]
    )
    assert blind.hit_tokens.tolist() == [0, 0, 0, 4, 4]
    assert told.hit_tokens.tolist()[3] == 8


class Oldest(Policy):
    """LRU once more, in Python."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self.leaves: set[int] = set()

    def end_request(self, request: EndedRequest, path: list[int]) -> None:
        for node in path:
            self.last[node] = request.serial

    def offer(self, node: int) -> None:
        if self.nodes.is_leaf(node):
            self.leaves.add(node)

    def withdraw(self, node: int) -> None:
        self.leaves.discard(node)

    def split(self, upper: int, lower: int) -> None:
        self.last[upper] = self.last.get(lower, 0)

    def merge(self, upper: int, lower: int) -> bool:
        return self.last.get(upper) == self.last.get(lower)

    def victim(self) -> int:
        return min(self.leaves, key=self.last.__getitem__)


@settings(deadline=None, max_examples=30)
@given(block_traces(), st.integers(1, 30))
def test_a_policy_in_python_runs_where_a_built_in_one_does(trace: BlockTrace, capacity: int) -> None:
    built_in, python = replay(trace, [ReplaySettings(capacity), ReplaySettings(capacity, policy=Oldest())])
    assert python.hit_tokens.tolist() == built_in.hit_tokens.tolist()


def test_the_example_of_a_policy_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "eviction_policy.py"), run_name="__main__")
    rates = [float(line.rsplit(maxsplit=1)[1].rstrip("%")) for line in capsys.readouterr().out.splitlines()]
    assert rates[1] > rates[0], "it beats LRU on the traffic that it was made for"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be from 1 .* got 0"),
        ({"num_blocks": 1, "policy": "belady"}, "unknown policy 'belady': choose one of lru"),
        ({"num_blocks": 1, "index": "trie"}, "unknown index 'trie'"),
        ({"num_blocks": 1, "sharing": "none"}, "unknown sharing 'none'"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(BlockTrace.from_paths([[1]], [5], 4), [ReplaySettings(**arguments)])  # type: ignore[arg-type]


def test_a_prompt_cannot_be_longer_than_its_request() -> None:
    with pytest.raises(ValueError, match=r"prompt_lengths\[0\] is 3; the request has 2 tokens"):
        TokenTrace(np.array([1, 2], dtype=np.int32), np.array([0, 2]), np.array([3]))
