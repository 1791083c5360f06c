"""Paged attention: right against a float64 twin, and the same bits however its work is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.engine.cpu import KvPool, ThreadPool, available_isas

from .attention_twin import Part, Prompt, blocks_for, new_pool, random_prompt, reference, run_step

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SCALE = 0.3


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def whole(pool: KvPool, prompt: Prompt, block_table: np.ndarray | None = None) -> torch.Tensor:
    """The prompt in one step, alone."""
    table = blocks_for(len(prompt), pool.block_size) if block_table is None else block_table
    return run_step(pool, [Part(prompt, 0, len(prompt), table)])[0]


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (8, 1, 128), (2, 2, 7), (6, 2, 16)]
)
@pytest.mark.parametrize("block_size", [16, 5])
def test_equals_the_twin(
    isa: str, dtype: torch.dtype, query_heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    prompt = random_prompt(291, query_heads, kv_heads, head_dim, dtype, generator(1))
    pool = new_pool(kv_heads, head_dim, dtype, block_size=block_size, isa=isa)
    assert pool.isa == isa
    torch.testing.assert_close(
        whole(pool, prompt).double(), reference(prompt, SCALE), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("chunks", [[1] * 300, [7] * 43, [64] * 5, [100] * 3, [257, 43], [299, 1]])
def test_any_chunking_gives_the_same_bits(isa: str, dtype: torch.dtype, quantized: bool, chunks: list[int]) -> None:
    prompt = random_prompt(300, 6, 2, 32, dtype, generator(2))
    expected = whole(new_pool(2, 32, dtype, quantized=quantized, isa=isa), prompt)
    pool = new_pool(2, 32, dtype, quantized=quantized, isa=isa)
    rows, start = [], 0
    for chunk in chunks:
        end = min(start + chunk, len(prompt))
        rows += run_step(pool, [Part(prompt, start, end, blocks_for(len(prompt), pool.block_size))])
        start = end
    assert torch.equal(torch.cat(rows), expected)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    quantized=st.booleans(),
    isa=st.sampled_from(available_isas()),
    block_size=st.sampled_from([1, 3, 16, 32, 256]),
    num_threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_batch_mates_and_blocks_do_not_matter(
    lengths: list[int],
    dtype: torch.dtype,
    quantized: bool,
    isa: str,
    block_size: int,
    num_threads: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """Random chunks of random prompts, packed in random order over shuffled blocks, against each prompt alone."""
    prompts = [random_prompt(n, 4, 2, 16, dtype, generator(seed + i)) for i, n in enumerate(lengths)]
    expected = [
        whole(new_pool(2, 16, dtype, quantized=quantized, isa=isa, num_blocks=32), prompt) for prompt in prompts
    ]
    sizes = [-(-n // block_size) for n in lengths]
    order = np.random.default_rng(seed).permutation(sum(sizes)).astype(np.int32)
    tables = np.split(order, np.cumsum(sizes)[:-1])
    threads = ThreadPool(num_threads)
    pool = new_pool(
        2, 16, dtype, quantized=quantized, isa=isa, block_size=block_size, num_blocks=sum(sizes), threads=threads
    )
    done = [0] * len(prompts)
    outputs: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        parts, who = [], []
        for i, prompt in enumerate(prompts):
            left = lengths[i] - done[i]
            if left:
                take = data.draw(st.sampled_from([1, min(left, 5), min(left, 130), left]))
                parts.append(Part(prompt, done[i], done[i] + take, tables[i]))
                who.append(i)
                done[i] += take
        for i, rows in zip(who, run_step(pool, parts), strict=True):
            outputs[i].append(rows)
    for i in range(len(prompts)):
        assert torch.equal(torch.cat(outputs[i]), expected[i])


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_sharing_a_prefix_gives_the_same_bits(isa: str, dtype: torch.dtype, quantized: bool, num_threads: int) -> None:
    """Sequences whose tables branch like a tree, decoding together, against each one alone in a pool of its own."""
    torch_generator = generator(3)
    trunk = random_prompt(512, 6, 2, 32, dtype, torch_generator)
    pool = new_pool(2, 32, dtype, num_blocks=200, threads=ThreadPool(num_threads), quantized=quantized, isa=isa)
    trunk_table = blocks_for(512, 16)
    run_step(pool, [Part(trunk, 0, 512, trunk_table)])
    parts, expected, free = [], [], 32
    for shared, own in [(512, 1), (512, 100), (512, 17), (320, 200), (320, 33), (64, 300), (16, 40), (0, 130)]:
        tail = random_prompt(own, 6, 2, 32, dtype, torch_generator)
        prompt = Prompt(*(torch.cat([getattr(trunk, n)[:shared], getattr(tail, n)]) for n in ("key", "value", "query")))
        table = np.concatenate([trunk_table[: shared // 16], blocks_for(own, 16, free)])
        free += -(-own // 16)
        if own > 1:
            run_step(pool, [Part(prompt, shared, len(prompt) - 1, table)])
        parts.append(Part(prompt, len(prompt) - 1, len(prompt), table))
        expected.append(whole(new_pool(2, 32, dtype, quantized=quantized, isa=isa), prompt)[-1:])
    for alone, together in zip(expected, run_step(pool, parts), strict=True):
        assert torch.equal(alone, together)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("block_size", [7, 16])
def test_a_nan_in_stale_slots_does_not_spread(isa: str, dtype: torch.dtype, quantized: bool, block_size: int) -> None:
    prompt = random_prompt(150, 4, 2, 24, dtype, generator(4))
    expected = whole(new_pool(2, 24, dtype, block_size=block_size, quantized=quantized, isa=isa), prompt)
    pool = new_pool(2, 24, dtype, block_size=block_size, quantized=quantized, isa=isa, num_blocks=30)
    poison = Prompt(*(torch.full_like(t[:1], float("nan")).expand(200, -1, -1) for t in vars(prompt).values()))
    whole(pool, poison, blocks_for(200, block_size))
    table = blocks_for(150, block_size)
    rows = [run_step(pool, [Part(prompt, i, i + 1, table)])[0] for i in range(3)]
    rows += run_step(pool, [Part(prompt, 3, 149, table)])
    rows += run_step(pool, [Part(prompt, 149, 150, table)])
    assert torch.equal(torch.cat(rows), expected)


def test_strided_tensors_are_read_as_they_are() -> None:
    """transformers hands heads over as transposed views."""
    prompt = random_prompt(70, 4, 2, 16, torch.float32, generator(5))
    expected = whole(new_pool(2, 16, torch.float32), prompt)
    heads_first = Prompt(*(t.transpose(0, 1).contiguous().transpose(0, 1) for t in vars(prompt).values()))
    assert not heads_first.query.is_contiguous()
    pool = new_pool(2, 16, torch.float32)
    batch = pool.batch([blocks_for(70, 16)], np.array([70]), np.array([70]), num_query_heads=4)
    pool.write(0, heads_first.key, heads_first.value, batch)
    assert torch.equal(pool.attend(0, heads_first.query, batch, SCALE), expected)


def test_wrong_tensors_are_refused() -> None:
    pool = new_pool(2, 16, torch.float32)
    batch = pool.batch([blocks_for(4, 16)], np.array([4]), np.array([4]), num_query_heads=4)
    good = torch.zeros(4, 4, 16)
    with pytest.raises(ValueError, match="shape"):
        pool.attend(0, good[:3], batch)
    with pytest.raises(ValueError, match="float64"):
        pool.attend(0, good.double(), batch)
    with pytest.raises(ValueError, match="stride"):
        pool.attend(0, torch.zeros(4, 4, 32)[:, :, ::2], batch)
    with pytest.raises(ValueError, match=r"scale is -1\.0"):
        pool.attend(0, good, batch, -1.0)
    with pytest.raises(ValueError, match="layer 1"):
        pool.attend(1, good, batch)
    with pytest.raises(ValueError, match="another pool"):
        new_pool(2, 16, torch.float32, block_size=32).attend(0, good, batch)


@pytest.mark.parametrize(
    ("table", "query_len", "context_len", "message"),
    [
        ([0, 1], 0, 4, "query length 0"),
        ([0, 1], 5, 4, "query length 5"),
        ([0], 1, 17, "needs 2 blocks"),
        ([64], 1, 1, "block 64"),
        ([-1], 1, 1, "block -1"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(table: list[int], query_len: int, context_len: int, message: str) -> None:
    pool = new_pool(2, 16, torch.float32, num_blocks=64)
    with pytest.raises(ValueError, match=message):
        pool.batch([np.array(table, dtype=np.int32)], np.array([query_len]), np.array([context_len]), num_query_heads=4)


def test_an_unknown_isa_is_refused() -> None:
    with pytest.raises(ValueError, match="'sse9' is not available"):
        new_pool(1, 8, torch.float32, isa="sse9")


def test_the_environment_names_the_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAUDEX_ISA", "generic")
    assert new_pool(1, 8, torch.float32).isa == "generic"
