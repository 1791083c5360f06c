"""What fewer bits give up: `--weights int8` and `int4`, `--kv-cache-dtype int8`, on text that every Python has.

    python benchmarks/quantization.py                       # a table
    python benchmarks/quantization.py --json FILE           # the same as JSON
    python benchmarks/quantization.py --model DIR --text FILE --windows 64

The text is Python's own help on its language (`pydoc_data.topics`), cut into windows of 512 tokens that are read from
their beginning. At every token a distribution over the vocabulary is compared with that of the model in bfloat16 as it
is served by default: the perplexity of the text, the Kullback-Leibler divergence, and how often both find the same
token likeliest. The first token of each window begins a greedy continuation of 64 tokens after 64 of the text; how many
of them come before the first that differs is counted too. The model in float32 shows what bfloat16 itself gives up.
"""

from __future__ import annotations

import argparse
import json
import platform
import pydoc_data.topics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig

from caudex.engine.cpu import CheckpointWeights, KvPool, LlamaRunner, ThreadPool, head_size
from caudex.engine.loading import locate_checkpoint
from caudex.engine.tokenizer import Tokenizer

WINDOW, PROMPT, CONTINUED, BLOCK_SIZE = 512, 64, 64, 16
BLOCKS = -(-WINDOW // BLOCK_SIZE)
REFERENCE = "bfloat16"
KINDS = {
    REFERENCE: (torch.bfloat16, None, False),
    "float32": (torch.float32, None, False),
    "int8 weights": (torch.bfloat16, 8, False),
    "int4 weights": (torch.bfloat16, 4, False),
    "int8 KV": (torch.bfloat16, None, True),
    "int8 weights and KV": (torch.bfloat16, 8, True),
}
"""Type of a model; the bits of its weights, if fewer; whether its keys and values are in 8."""

Rows = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Loss:
    """What a kind of model gives up against the reference, over all tokens; `bytes`: of the packed weights."""

    kind: str
    bytes: int
    perplexity: float
    mean_divergence: float
    worst_percent_divergence: float
    same_likeliest: float
    same_beginning: float


class Model:
    """One sequence at a time through the kernels that serve it."""

    def __init__(self, directory: Path, kind: str, threads: ThreadPool) -> None:
        config: Any = AutoConfig.from_pretrained(directory)
        checkpoint = CheckpointWeights.find(directory)
        if checkpoint is None:
            raise SystemExit(f"{directory} has no safetensors")
        dtype, weight_bits, kv_in_8_bits = KINDS[kind]
        layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
        shape = layers, BLOCKS, BLOCK_SIZE, kv_heads, head_size(config)
        self.pool = KvPool(*shape, dtype, quantized=kv_in_8_bits, threads=threads)
        self.runner = LlamaRunner(config, checkpoint, self.pool, WINDOW, bits=weight_bits)
        self.heads = config.num_attention_heads

    def logits(self, tokens: Rows, context: int) -> Tensor:
        """After every one of `tokens`, which follow `context` others: [tokens, vocabulary]."""
        table = np.arange(BLOCKS, dtype=np.int32)
        lengths = np.array([len(tokens)]), np.array([context + len(tokens)])
        batch = self.pool.batch([table], *lengths, num_query_heads=self.heads)
        return self.runner.forward(tokens, batch, np.arange(len(tokens), dtype=np.int32))

    def continuation(self, prompt: Rows) -> list[int]:
        tokens: list[int] = []
        new = prompt
        for _ in range(CONTINUED):
            context = len(prompt) + len(tokens) - 1 if tokens else 0
            tokens.append(int(self.logits(new, context)[-1].argmax()))
            new = np.array(tokens[-1:], dtype=np.int32)
        return tokens


def windows_of(text: str, tokenizer: Tokenizer, count: int) -> list[Rows]:
    ids = tokenizer.encode(text[: count * WINDOW * 8], add_special_tokens=False)[: count * WINDOW]
    if len(ids) < count * WINDOW:
        raise SystemExit(f"the text has {len(ids)} tokens; {count} windows take {count * WINDOW}")
    return [np.array(ids[i : i + WINDOW], dtype=np.int32) for i in range(0, len(ids), WINDOW)]


def common_beginning(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def measure(models: dict[str, Model], windows: list[Rows]) -> list[Loss]:
    surprise, divergence, same, begun = ({name: [] for name in models} for _ in range(4))  # type: ignore[var-annotated]
    for window in track(windows, "windows", console=Console(stderr=True), transient=True):
        expected = models[REFERENCE].logits(window, 0)[:-1].log_softmax(-1)
        reference = models[REFERENCE].continuation(window[:PROMPT])
        for name, model in models.items():
            found = model.logits(window, 0)[:-1].log_softmax(-1)
            surprise[name].append(-found.gather(1, torch.from_numpy(window[1:, None]).long())[:, 0])
            divergence[name].append((expected.exp() * (expected - found)).sum(-1))
            same[name].append(found.argmax(-1) == expected.argmax(-1))
            begun[name].append(common_beginning(model.continuation(window[:PROMPT]), reference))
    return [
        Loss(
            name,
            model.runner.num_bytes,
            float(torch.cat(surprise[name]).mean().exp()),
            float(torch.cat(divergence[name]).mean()),
            float(torch.cat(divergence[name]).quantile(0.99)),
            float(torch.cat(same[name]).float().mean()),
            float(np.mean(begun[name])),
        )
        for name, model in models.items()
    ]


def show(losses: list[Loss], tokens: int) -> None:
    table = Table(title=f"{tokens:,} tokens, against {REFERENCE}", title_justify="left")
    heads = ["", "MB of weights", "perplexity", "divergence", "its 99th percentile", "same likeliest token"]
    for head in [*heads, f"of {CONTINUED} greedy tokens before one differs"]:
        table.add_column(head, justify="right")
    for loss in losses:
        table.add_row(
            loss.kind,
            f"{loss.bytes / 1e6:.0f}",
            f"{loss.perplexity:.3f}",
            f"{loss.mean_divergence:.5f}",
            f"{loss.worst_percent_divergence:.4f}",
            f"{loss.same_likeliest:.1%}",
            f"{loss.same_beginning:.1f}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as for caudex serve; one that the fused runner serves")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, dest="json_file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    directory = locate_checkpoint(options.model).directory
    text = options.text.read_text() if options.text else "\n".join(map(str, pydoc_data.topics.topics.values()))
    windows = windows_of(text, Tokenizer.load(directory, None), options.windows)
    threads = ThreadPool(options.threads)
    losses = measure({kind: Model(directory, kind, threads) for kind in KINDS}, windows)
    show(losses, len(windows) * WINDOW)
    if options.json_file:
        about = {"python": platform.python_version(), "model": directory.name, "argv": sys.argv[1:]}
        options.json_file.write_text(json.dumps({**about, "losses": [asdict(loss) for loss in losses]}, indent=1))


if __name__ == "__main__":
    main()
