"""The compiled CPU kernels beside PyTorch's, and the fused model beside transformers', in one run.

    python benchmarks/kernels.py                  # tables
    python benchmarks/kernels.py --json FILE      # the same as JSON
    python benchmarks/kernels.py --only products,attention --threads 1
    python benchmarks/kernels.py --only attention,model --kv-cache-dtype int8

Shapes are SmolLM2-135M's: 30 layers, 576 wide, 9 query heads on 3 KV heads of 64. Products run through the weights of
all layers, so that they come from memory as in a decode step. PyTorch gets what suits it best: keys and values
gathered in contiguous tensors beforehand, attention by `scaled_dot_product_attention`, the same number of threads.
Times are medians of `--repeats` runs after one to warm up, the two alternating; on a busy machine compare ratios.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.functional import linear, scaled_dot_product_attention

from caudex import _core
from caudex.engine.config import KvCacheDTypeName
from caudex.engine.cpu import BatchMetadata, KvPool, LlamaRunner, PackedLinear, ThreadPool

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, CONTEXT = 30, 9, 3, 64, 16, 1500
WEIGHTS = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
ROWS = [1, 2, 4, 8, 12, 13, 16, 24, 32, 64, 256, 1500]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHARED_BLOCKS = 92
clock = time.perf_counter


@dataclass(frozen=True, slots=True)
class Result:
    """A case's median milliseconds by ours and by PyTorch's (None where it was left out)."""

    section: str
    case: str
    milliseconds: float
    torch_milliseconds: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    dtype: torch.dtype
    threads: ThreadPool
    isa: str
    repeats: int
    compare: bool
    kv_in_8_bits: bool


def race(setting: Setting, ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float | None]:
    """Median milliseconds of each, run by turns; PyTorch has threads in its own turns only, since idle ones spin."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(setting.repeats + 1):
        for side, call in enumerate((ours, theirs)):
            if side == 1 and not setting.compare:
                continue
            torch.set_num_threads(setting.threads.num_threads if side else 1)
            start = clock()
            call()
            if repeat:
                times[side].append((clock() - start) * 1e3)
    torch.set_num_threads(1)
    return statistics.median(times[0]), statistics.median(times[1]) if times[1] else None


def products(setting: Setting) -> list[Result]:
    """All linear layers of the model at growing numbers of rows."""
    product, arena = _core.PackedProduct(setting.threads.native, setting.isa), _core.Arena()
    weights = [torch.randn(shape).to(setting.dtype) / 8 for _ in range(LAYERS) for shape in WEIGHTS]
    packed = [PackedLinear(weight, None, product, arena) for weight in weights]
    size = sum(weight.numel() for weight in weights)
    results = []
    for rows in track(ROWS, "products", console=Console(stderr=True), transient=True):
        inputs = {depth: torch.randn(rows, depth).to(setting.dtype) for _, depth in WEIGHTS}

        def ours(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for layer in packed:
                layer(inputs[layer.in_features])

        def theirs(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for weight in weights:
                linear(inputs[weight.shape[1]], weight)

        seconds, torch_seconds = race(setting, ours, theirs)
        bandwidth = size * weights[0].element_size() / seconds / 1e6
        note = f"{bandwidth:.1f} GB/s, {2 * size * rows / seconds / 1e6:.0f} GFLOP/s"
        results.append(Result("products", f"{rows} rows", seconds, torch_seconds, note))
    return results


@dataclass(frozen=True, slots=True)
class Step:
    """Sequences of a step by their query and context lengths; `shared`: their tables begin with the same blocks."""

    name: str
    query_lens: list[int]
    context_lens: list[int]
    shared: bool = False

    def tables(self) -> list[NDArray[np.int32]]:
        per_sequence = -(-CONTEXT // BLOCK_SIZE)
        tables = []
        for i in range(len(self.query_lens)):
            table = np.arange(i * per_sequence, (i + 1) * per_sequence, dtype=np.int32)
            if self.shared:
                table[:SHARED_BLOCKS] = np.arange(SHARED_BLOCKS)
            tables.append(table)
        return tables

    def batch(self, pool: KvPool) -> BatchMetadata:
        query_lens, context_lens = np.array(self.query_lens), np.array(self.context_lens)
        return pool.batch(self.tables(), query_lens, context_lens, num_query_heads=QUERY_HEADS)


STEPS = [
    Step("prefill of 1,500", [1500], [1500]),
    Step("12 on 1,472 cached", [12], [1484]),
    Step("28 on 1,472 cached", [28], [1500]),
    Step("decode, 1 at 257", [1], [257]),
    Step("decode, 1 at 1,500", [1], [1500]),
    Step("decode, 8 at 257", [1] * 8, [257] * 8),
    Step("decode, 8 at 1,500", [1] * 8, [1500] * 8),
    Step("decode, 8 at 1,500, 1,472 shared", [1] * 8, [1500] * 8, shared=True),
]


def new_pool(setting: Setting) -> KvPool:
    threads, blocks = setting.threads, 8 * -(-CONTEXT // BLOCK_SIZE)
    shape = LAYERS, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM
    return KvPool(*shape, setting.dtype, quantized=setting.kv_in_8_bits, threads=threads, isa=setting.isa)


def attention(setting: Setting) -> list[Result]:
    """All layers' attention of a step."""
    pool = new_pool(setting)
    key, value = (torch.randn(CONTEXT, KV_HEADS, HEAD_DIM).to(setting.dtype) for _ in range(2))
    for table in Step("", [1] * 8, [1] * 8).tables():
        batch = pool.batch([table], np.array([CONTEXT]), np.array([CONTEXT]), num_query_heads=QUERY_HEADS)
        for layer in range(LAYERS):
            pool.write(layer, key, value, batch)
    results = []
    for step in track(STEPS, "attention", console=Console(stderr=True), transient=True):
        query = torch.randn(sum(step.query_lens), QUERY_HEADS, HEAD_DIM).to(setting.dtype)

        def ours(step: Step = step, query: torch.Tensor = query) -> None:
            batch = step.batch(pool)
            for layer in range(LAYERS):
                pool.attend(layer, query, batch)

        theirs = gathered_attention(step, query, key, value)
        results.append(Result("attention", step.name, *race(setting, ours, theirs)))
    return results


def gathered_attention(step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Callable[[], None]:
    """The step by PyTorch, from copies of every layer's and sequence's keys and values."""
    copies = [
        [(key[:n].transpose(0, 1).clone()[None], value[:n].transpose(0, 1).clone()[None]) for n in step.context_lens]
        for _ in range(LAYERS)
    ]
    queries = [part.transpose(0, 1)[None] for part in torch.split(query, step.query_lens)]
    masks = [
        torch.ones(q, n, dtype=torch.bool).tril(n - q) if 1 < q < n else None
        for q, n in zip(step.query_lens, step.context_lens, strict=True)
    ]

    def run() -> None:
        for layer in copies:
            for part, (k, v), mask in zip(queries, layer, masks, strict=True):
                causal = part.shape[2] == k.shape[2]
                scaled_dot_product_attention(part, k, v, mask, is_causal=causal, enable_gqa=True)

    return run


def model(setting: Setting) -> list[Result]:
    """Whole steps of SmolLM2-135M-Instruct: token ids to the logits of each sequence's last token."""
    from transformers import AutoModelForCausalLM, DynamicCache

    from caudex.engine.loading import locate_checkpoint

    module = AutoModelForCausalLM.from_pretrained(locate_checkpoint(None).directory, dtype=setting.dtype).eval()
    pool = new_pool(setting)
    runner = LlamaRunner(module.config, module.state_dict(), pool, CONTEXT)
    generator = np.random.default_rng(0)
    results = []
    for step in track(STEPS, "model", console=Console(stderr=True), transient=True):
        tokens = generator.integers(0, runner.vocab_size, sum(step.query_lens)).astype(np.int32)
        last_rows = (np.cumsum(step.query_lens) - 1).astype(np.int32)

        def ours(step: Step = step, tokens: NDArray[np.int32] = tokens, rows: NDArray[np.int32] = last_rows) -> None:
            runner.forward(tokens, step.batch(pool), rows)

        ids = torch.from_numpy(tokens).long().view(len(step.query_lens), -1)
        cached = step.context_lens[0] - ids.shape[1]
        cache = DynamicCache(config=module.config)
        if cached:
            with torch.inference_mode():
                module(ids[:, :1].expand(-1, cached), past_key_values=cache, logits_to_keep=1)

        def theirs(ids: torch.Tensor = ids, cache: Any = cache) -> None:
            with torch.inference_mode():
                module(ids, past_key_values=cache, logits_to_keep=1)
                cache.crop(-ids.shape[1])

        results.append(Result("model", step.name, *race(setting, ours, theirs)))
    return results


SECTIONS = {"products": products, "attention": attention, "model": model}


def print_table(section: str, results: list[Result]) -> None:
    table = Table(title=section, title_justify="left")
    for heading, justify in (("", "left"), ("ms", "right"), ("PyTorch ms", "right"), ("ratio", "right"), ("", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for result in results:
        theirs = result.torch_milliseconds
        compared = ("", "") if theirs is None else (f"{theirs:.2f}", f"{theirs / result.milliseconds:.1f}x")
        table.add_row(result.case, f"{result.milliseconds:.2f}", *compared, result.note)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by commas: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=get_args(KvCacheDTypeName), default="auto")
    parser.add_argument("--threads", type=int, help="for both; default: one for each CPU")
    parser.add_argument("--isa", default="auto", help="instruction set; see caudex.engine.cpu.available_isas()")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-torch", action="store_true", help="measure ours alone")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    unknown = set(arguments.only.split(",")) - set(SECTIONS)
    if unknown:
        sys.exit(f"unknown section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    threads = ThreadPool(arguments.threads)
    setting = Setting(
        DTYPES[arguments.dtype],
        threads,
        arguments.isa,
        arguments.repeats,
        compare=not arguments.no_torch,
        kv_in_8_bits=arguments.kv_cache_dtype == "int8",
    )
    torch.manual_seed(0)
    results = []
    for section in arguments.only.split(","):
        rows = SECTIONS[section](setting)
        print_table(section, rows)
        results += rows
    if arguments.json:
        machine = {"processor": platform.processor() or platform.machine(), "threads": threads.num_threads}
        figures = {"machine": machine, "dtype": arguments.dtype, "results": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
