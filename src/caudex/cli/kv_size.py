"""`caudex kv-size`: how much memory a token's keys and values take."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command("kv-size")
@click.argument("model")
@click.option("--dtype", default="bf16", show_default=True, help="Type that KV is kept in (bf16, fp8, q8_0, ...).")
@click.option(
    "--tensor-parallel", type=click.IntRange(1), default=1, show_default=True, help="Devices that share the heads."
)
@click.option("--tokens", type=click.IntRange(1), help="Also the size of a prefix of this many tokens.")
@click.option("--gpu", metavar="G", help="Also how many tokens fit beside the weights.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model: str, dtype: str, tensor_parallel: int, tokens: int | None, gpu: str | None, as_json: bool) -> None:
    """KV bytes a token of MODEL: a config.json, a model's folder, or a well-known name (Llama-3.1-8B)."""
    from caudex.cli.reading import user_errors
    from caudex.report.numbers import bytes_text
    from caudex.sizing.kv_pool import pool_blocks_on
    from caudex.sizing.kv_size import kv_size

    with user_errors():
        size = kv_size(model, dtype, tensor_parallel=tensor_parallel)
        fitting = None if gpu is None else pool_blocks_on(gpu, size, 1)
    if as_json:
        click.echo(json.dumps(asdict(size) | {"bytes_per_cached_token": size.bytes_per_cached_token}))
        return
    layers = f"{size.full_layers} layers" + (f" + {size.sliding_layers} sliding" if size.sliding_layers else "")
    click.echo(f"{size.model}: {bytes_text(size.bytes_per_cached_token)} a token ({size.attention}, {layers}, {dtype})")
    if size.sliding_window:
        kept = bytes_text(size.bytes_per_token)
        click.echo(
            f"  {kept} a token beyond the window of {size.sliding_window:,} tokens, if the engine frees what slid out"
        )
    if tokens is not None:
        click.echo(f"  {bytes_text(size.bytes_of_prefix(tokens))} for a prefix of {tokens:,} tokens")
    if gpu is not None:
        click.echo(
            f"  {fitting:,} tokens beside the weights on {gpu}"
            if fitting
            else f"  the model's weights do not fit on {gpu}"
        )
