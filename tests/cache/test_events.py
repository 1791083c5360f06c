"""KV events: what a follower reconstructs from them is what the cache holds."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import pytest
from tests.cache.engine_double import MiniEngine

from caudex.cache import OutOfBlocks, PrefixCache, block_keys
from caudex.cache.events import END_OF_REPLAY, EventPublisher, take_batch
from caudex.cache.namespace import join_namespace
from caudex.routing.kv_events import BlocksStored, decode_batch

zmq = pytest.importorskip("zmq")


def low64(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


class Follower:
    """What somebody knows who hears of every event, in the wire's words."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def hear(self, payload: bytes) -> None:
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            match event["type"]:
                case "BlockStored":
                    hashes, size = event["block_hashes"], event["block_size"]
                    assert len(event["token_ids"]) == len(hashes) * size
                    parent = event["parent_block_hash"]
                    assert parent is None or parent in self.blocks, "a block comes after its parent"
                    assert not self.blocks & set(hashes), "a block is stored once"
                    self.blocks.update(hashes)
                case "BlockRemoved":
                    assert set(event["block_hashes"]) <= self.blocks
                    self.blocks.difference_update(event["block_hashes"])
                case "AllBlocksCleared":
                    self.blocks.clear()


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("seed", range(4))
def test_a_follower_knows_every_whole_block(index: Any, seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixCache(12, block_size=2, index=index, secret=0)
    cache.enable_events()
    hash_name = "fold64" if index == "radix" else "fold128"
    follower = Follower()
    prompts: set[tuple[str, tuple[int, ...]]] = set()
    live: list[Any] = []
    for step in range(200):
        space = rng.choice(["", "salt"])
        prompt = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 9)))
        prompts.add((space, prompt))
        seq = cache.begin(prompt, space)
        try:
            seq.allocate(len(prompt))
        except OutOfBlocks:
            seq.release()
            continue
        seq.commit(len(prompt))
        live.append(seq)
        if len(live) > 2:
            live.pop(0).release()
        if step == 100:
            cache.clear()
        batch = take_batch(cache)
        if batch is not None:
            follower.hear(msgspec.msgpack.encode(batch))
        expected = {
            low64(key)
            for s, tokens in prompts
            for i, key in enumerate(block_keys(tokens, 2, hash=hash_name, namespace=s))
            if cache.match([*tokens[: 2 * i + 2], 9], s).num_whole == 2 * i + 2
        }
        assert follower.blocks == expected


@pytest.mark.parametrize("salt", ["", "salt"])
@pytest.mark.parametrize("adapter", [None, "law"])
def test_a_router_learns_salt_and_adapter(salt: str, adapter: str | None) -> None:
    cache = PrefixCache(16, block_size=4)
    cache.enable_events()
    MiniEngine(cache).serve(range(12), join_namespace(salt, adapter))
    first, *later = decode_batch(msgspec.msgpack.encode(take_batch(cache)))
    assert isinstance(first, BlocksStored)
    assert (first.parent, first.salt, first.adapter) == (None, salt, adapter or "")
    assert all(isinstance(event, BlocksStored) and event.adapter == first.adapter for event in later)


def receive(socket: Any) -> list[bytes]:
    assert socket.poll(5000), "nothing came"
    frames: list[bytes] = socket.recv_multipart()
    return frames


def test_published_batches_are_numbered_and_can_be_had_again() -> None:
    cache = PrefixCache(16, block_size=4)
    engine = MiniEngine(cache)
    context = zmq.Context()
    with EventPublisher(
        cache, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", topic="kv", rank=3, interval=0.002
    ) as publisher:
        sub = context.socket(zmq.SUB)
        sub.connect(publisher.endpoint)
        sub.setsockopt(zmq.SUBSCRIBE, b"kv")
        heard: list[tuple[bytes, bytes]] = []
        for i in range(200):  # a subscription takes a moment to arrive
            engine.serve(range(100 * i, 100 * i + 8), "salt")
            time.sleep(0.01)
            if sub.poll(0):
                break
        topic, number, payload = receive(sub)
        heard.append((number, payload))
        assert topic == b"kv"
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 3
        assert abs(time.time() - ts) < 60
        stored = next(event for event in events if event["type"] == "BlockStored")
        assert (stored["block_size"], stored["extra_keys"], stored["parent_block_hash"]) == (4, [["salt"], None], None)

        replay = context.socket(zmq.DEALER)
        replay.connect(publisher.replay_endpoint)
        replay.send_multipart((b"", (0).to_bytes(8, "big")))
        again: list[tuple[bytes, bytes]] = []
        while (frames := receive_part(replay)) is not None:
            again.append(frames)
        assert [int.from_bytes(number, "big") for number, _ in again] == list(range(len(again)))
        assert heard[0] in again
        follower = Follower()
        for _, batch in again:
            follower.hear(batch)
        assert len(follower.blocks) == cache.num_cached_blocks
        sub.close(linger=0)
        replay.close(linger=0)
    context.term()


def test_an_address_is_free_again_when_its_publisher_is_closed() -> None:
    cache, endpoints = PrefixCache(16, block_size=4), ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    for _ in range(100):
        with EventPublisher(cache, *endpoints, interval=0.001) as publisher:
            assert publisher.replay_endpoint is not None
            endpoints = (publisher.endpoint, publisher.replay_endpoint)


def receive_part(socket: Any) -> tuple[bytes, bytes] | None:
    """One batch of a replay."""
    number, payload = receive(socket)[-2:]
    return None if number == END_OF_REPLAY else (number, payload)


def test_nobody_waits_for_a_subscriber_that_does_not_read() -> None:
    cache = PrefixCache(64, block_size=1)
    cache.enable_events(max_blocks=100)
    engine = MiniEngine(cache)
    for i in range(50):
        engine.serve(range(10 * i, 10 * i + 10))
    events = cache.take_events()
    assert events[0] == ("cleared",), "a log that nobody takes starts anew"
    assert sum(len(event[1]) for event in events[1:]) <= 100
