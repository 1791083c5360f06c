"""Blocks that come back from a tier: the same bits, never another's, and never a request that waits for a store."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from caudex.engine.config import EngineConfig
from caudex.engine.engine import Engine
from caudex.engine.kv_fingerprint import SEEN_OTHERWISE, TIME_ONLY, adapter_digests, kv_fingerprint
from caudex.tiers.disk_store import DiskStore
from caudex.tiers.memory_store import MemoryStore
from caudex.tiers.stack import TierStack
from caudex.tiers.store import BlockKey
from caudex.tiers.store_spec import StoreSpec

from .bit_sweep import save_adapter
from .harness import Result, assert_nothing_leaked, greedy, running_engine, submit

PROMPT = [(7 * i * i + i) % 250 for i in range(200)]
BLOCK_SIZE = 8
WHOLE = 192  # Of 200 tokens, 24 whole blocks besides the one whose last token is computed.


@pytest.fixture(autouse=True)
def always_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models compute faster than any store answers; what is not measured is always asked."""
    monkeypatch.setattr(TierStack, "note_computed", lambda *_: None)


@pytest.fixture
def settings(tiny_model: Callable[[str], Path], tmp_path: Path) -> dict[str, Any]:
    return {
        "model": str(tiny_model("llama")),
        "num_blocks": 64,
        "block_size": BLOCK_SIZE,
        "kv_tiers": (f"disk:{tmp_path}/kv",),
    }


def ask(engine: Engine, prompt: Sequence[int] = PROMPT, **others: Any) -> Result:
    return submit(engine, prompt, greedy(12, logprobs=3), **others).wait()


def await_written(engine: Engine, num_blocks: int) -> None:
    """Wait until the tier has at least so many blocks; what is still on its way there would be a miss."""
    while engine.stats().kv_tiers[0].written < num_blocks:
        time.sleep(0.01)


def bits(result: Result) -> object:
    return result.tokens, result.logprobs, result.text


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_restart_finds_the_same_bits(
    architecture: str, backend: str, tiny_model: Callable[[str], Path], settings: dict[str, Any]
) -> None:
    settings |= {"model": str(tiny_model(architecture)), "attention_backend": backend}
    with running_engine(**settings) as engine:
        first = ask(engine)
        assert first.last.num_cached_tokens == 0
    with running_engine(**settings) as engine:
        again = ask(engine)
        assert again.last.num_cached_tokens == WHOLE
        assert bits(again) == bits(first)
        stats = engine.stats()
        assert (stats.tier_hits, stats.prefix_cache_hits) == (WHOLE, WHOLE)
        assert stats.kv_tiers[0].hits == WHOLE // BLOCK_SIZE
        assert_nothing_leaked(engine)


def test_what_the_pool_evicts_comes_back_and_an_answer_goes_on(settings: dict[str, Any]) -> None:
    with running_engine(**settings | {"num_blocks": 40}) as engine:
        first = ask(engine)
        going_on = PROMPT + first.tokens + [1, 2, 3, 4]
        alone = [ask(engine, [number] * 200) for number in range(4)]
        await_written(engine, 5 * len(PROMPT) // BLOCK_SIZE)
        later = ask(engine, going_on)
        assert later.last.num_cached_tokens >= len(PROMPT)
        assert [bits(ask(engine, [number] * 200)) for number in range(4)] == [bits(result) for result in alone]
        assert bits(ask(engine)) == bits(first)
        assert engine.stats().tier_hits > 0
        assert_nothing_leaked(engine)
    with running_engine(**settings | {"kv_tiers": ()}) as engine:
        assert bits(ask(engine, going_on)) == bits(later)


def test_a_part_of_the_prompt_is_in_the_pool(settings: dict[str, Any]) -> None:
    with running_engine(**settings) as engine:
        first = ask(engine)
    with running_engine(**settings) as engine:
        ask(engine, PROMPT[:100])
        again = ask(engine)
        assert again.last.num_cached_tokens == WHOLE
        assert bits(again) == bits(first)


def test_many_at_once_share_one_fetch(settings: dict[str, Any]) -> None:
    questions = [PROMPT + [number] * 5 for number in range(12)]
    with running_engine(**settings) as engine:
        alone = [bits(ask(engine, question)) for question in questions]
    with running_engine(**settings) as engine:
        results = [submit(engine, question, greedy(12, logprobs=3)) for question in questions]
        assert [bits(result.wait()) for result in results] == alone
        assert all(result.last.num_cached_tokens >= WHOLE for result in results)
        assert engine.stats().kv_tiers[0].hits <= 2 * len(PROMPT) // BLOCK_SIZE
        assert_nothing_leaked(engine)


def test_damaged_missing_and_misplaced_files_are_computed_again(settings: dict[str, Any], tmp_path: Path) -> None:
    with running_engine(**settings) as engine:
        first = ask(engine)
    files = sorted((tmp_path / "kv").glob("??/*.kv"), key=lambda file: file.stat().st_mtime_ns)
    shutil.copyfile(files[0], files[3])
    files[7].write_bytes(files[7].read_bytes()[:-1])
    files[11].unlink()
    garbled = bytearray(files[15].read_bytes())
    garbled[len(garbled) // 2] ^= 4
    files[15].write_bytes(garbled)
    for _ in range(2):
        with running_engine(**settings) as engine:
            assert bits(ask(engine)) == bits(first)
    with running_engine(**settings) as engine:
        again = ask(engine)
        assert again.last.num_cached_tokens == WHOLE, "what was damaged is mended"
        assert bits(again) == bits(first)


def test_tenants_namespaces_and_adapters_are_apart(settings: dict[str, Any], tmp_path: Path) -> None:
    model = Path(settings["model"])
    settings["lora_adapters"] = {name: save_adapter(model, tmp_path / name, seed) for seed, name in enumerate("abc")}
    callers: list[dict[str, Any]] = [
        {},
        {"tenant": "one"},
        {"tenant": "two"},
        {"namespace": "one"},
        {"adapter": "a"},
        {"adapter": "b"},
        {"adapter": "a", "tenant": "one"},
    ]
    with running_engine(**settings) as engine:
        alone = [ask(engine, **caller) for caller in callers]
        assert [result.last.num_cached_tokens for result in alone] == [0] * len(callers)
    with running_engine(**settings) as engine:
        strangers: list[dict[str, Any]] = [{"tenant": "three"}, {"namespace": "three"}, {"adapter": "c"}]
        assert [ask(engine, **caller).last.num_cached_tokens for caller in strangers] == [0] * 3
        again = [ask(engine, **caller) for caller in callers]
        assert [result.last.num_cached_tokens for result in again] == [WHOLE] * len(callers)
        assert [bits(result) for result in again] == [bits(result) for result in alone]
    with running_engine(**settings | {"sharing": "shared"}) as engine:
        assert ask(engine, tenant="one").last.num_cached_tokens == WHOLE, "of nobody in particular"
        assert ask(engine, tenant="four").last.num_cached_tokens > 0


def test_an_adapters_weights_count_and_not_its_name(settings: dict[str, Any], tmp_path: Path) -> None:
    folders = [save_adapter(Path(settings["model"]), tmp_path / name, seed) for seed, name in enumerate("ab")]
    with running_engine(**settings, lora_adapters={"law": folders[0]}) as engine:
        law = ask(engine, adapter="law")
    with running_engine(**settings, lora_adapters={"verse": folders[0], "law": folders[1]}) as engine:
        assert ask(engine, adapter="law").last.num_cached_tokens == 0
        again = ask(engine, adapter="verse")
        assert again.last.num_cached_tokens == WHOLE
        assert bits(again) == bits(law)


def test_whatever_changes_bits_changes_the_fingerprint(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), checkpoint)
    config = EngineConfig(model=str(checkpoint))
    known = kv_fingerprint(config, checkpoint, "format")
    same = replace(config, num_blocks=7, max_num_seqs=3, seed=8, served_model_name="x", policy="lru")
    assert kv_fingerprint(same, checkpoint, "format") == known
    different = [
        kv_fingerprint(replace(config, dtype="float32"), checkpoint, "format"),
        kv_fingerprint(replace(config, weights="int8"), checkpoint, "format"),
        kv_fingerprint(replace(config, block_size=32), checkpoint, "format"),
        kv_fingerprint(config, checkpoint, "another format"),
    ]
    weights = checkpoint / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    different.append(kv_fingerprint(config, checkpoint, "format"))
    assert len({known, *different}) == 6
    assert {"dtype", "weights", "block_size", "attention_backend"}.isdisjoint(TIME_ONLY | SEEN_OTHERWISE)
    assert adapter_digests({"a": checkpoint}) == adapter_digests({"a": checkpoint})


class Obstinate(MemoryStore):
    """A store that takes its time to read, or breaks."""

    def __init__(self, seconds: float = 0.0, breaks: bool = False) -> None:
        super().__init__(2**26)
        self.seconds, self.breaks = seconds, breaks

    def get_many(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        time.sleep(self.seconds)
        if self.breaks:
            raise RuntimeError("a fault of the store's own")
        return super().get_many(keys)


@pytest.fixture
def stored(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Obstinate, Result]:
    """A store that all engines of this test have, with the prompt's blocks in it, and the answer to the prompt."""
    store = Obstinate()
    monkeypatch.setattr(store, "close", lambda: None)
    monkeypatch.setattr("caudex.engine.engine.parse_store", lambda text: StoreSpec(text, lambda: store))
    with running_engine(**settings) as engine:
        first = ask(engine)
    return store, first


def test_a_store_that_breaks_or_hangs_is_a_miss(
    settings: dict[str, Any], stored: tuple[Obstinate, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first = stored
    monkeypatch.setattr("caudex.engine.kv_tiers.DEFAULT_LIMIT_SECONDS", 0.3)
    store.breaks = True
    with running_engine(**settings) as engine:
        broken = ask(engine)
        assert engine.stats().kv_tiers[0].read_errors == 1
    store.breaks, store.seconds = False, 3.0
    with running_engine(**settings) as engine:
        slow = submit(engine, PROMPT, greedy(12, logprobs=3))
        other = ask(engine, [3] * 50)
        assert not slow.done.is_set() or other.done.is_set()
        hung = slow.wait()
        cancelled = submit(engine, [9] * 90, greedy(12))
        engine.abort(cancelled.request_id)
        assert cancelled.wait().last.finish_reason == "abort"
        assert_nothing_leaked(engine)
    for result in (broken, hung):
        assert result.last.num_cached_tokens == 0
        assert bits(result) == bits(first)


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing(
    settings: dict[str, Any], stored: tuple[Obstinate, Result]
) -> None:
    store, first = stored
    store.seconds = 0.5
    with running_engine(**settings) as engine:
        cancelled = submit(engine, PROMPT, greedy(5))
        time.sleep(0.1)
        engine.abort(cancelled.request_id)
        assert cancelled.wait().last.finish_reason == "abort"
        again = ask(engine)
        assert bits(again) == bits(first)
        assert_nothing_leaked(engine)


def test_shutting_down_ends_requests_that_wait(settings: dict[str, Any], stored: tuple[Obstinate, Result]) -> None:
    store, first = stored
    store.seconds = 0.3
    for drain, reason in ((True, "length"), (False, "abort")):
        engine = Engine.load(EngineConfig(num_threads=1, debug=True, **settings))
        engine.start()
        result = submit(engine, PROMPT, greedy(12, logprobs=3))
        time.sleep(0.05)
        assert engine.shutdown(drain=drain)
        assert result.wait().last.finish_reason == reason
        if drain:
            assert bits(result) == bits(first)


def test_a_folder_that_cannot_be_used_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="KV blocks cannot be kept in"):
        Engine.load(EngineConfig(model="/no/such/model", kv_tiers=(f"disk:{tmp_path}/file/kv",)))
    with pytest.raises(ValueError, match="prefix caching is off"):
        EngineConfig(kv_tiers=("memory",), enable_prefix_caching=False)
    with pytest.raises(ValueError, match="'disk' is no KV tier"):
        EngineConfig(kv_tiers=("disk",))


def test_a_disk_tier_keeps_within_its_size(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["kv_tiers"] = (f"disk:{tmp_path}/kv,size=200K",)
    with running_engine(**settings) as engine:
        answers = [ask(engine, [number] * 200) for number in range(6)]
    assert 0 < DiskStore(tmp_path / "kv", 2**30).num_bytes <= 200 * 1024
    with running_engine(**settings) as engine:
        again = ask(engine, [5] * 200)
        assert bits(again) == bits(answers[5])
