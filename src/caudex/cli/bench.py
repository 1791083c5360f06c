"""`caudex bench`: measure any OpenAI-compatible server, with its prefix cache and without."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
from pathlib import Path
from typing import Any

import click

from caudex.bench.client import Endpoint, ServerError, first_model
from caudex.bench.player import Scale
from caudex.bench.run import Plan, play
from caudex.bench.scenes import DEFAULT_SCENES, SCENES
from caudex.bench.summary import Summary
from caudex.bench.tables import Row, show
from caudex.cli.options import GroupedCommand, option_group
from caudex.cli.progress import CountBar

SCALE = Scale()

server = option_group("Server")
what = option_group("What to play")
size = option_group("How large")
output = option_group("Output")

EPILOG = "\\b\nScenes:\n" + "".join(f"  {scene.name:14} {scene.summary}\n" for scene in SCENES.values())


@click.command(cls=GroupedCommand, epilog=EPILOG, context_settings={"show_default": True, "max_content_width": 110})
@click.argument("url")
@server("--model", help="Name to ask for.  [default: the first that the server lists]")
@server("--api-key", help="Sent as 'Authorization: Bearer KEY'.")
@server("--strict", is_flag=True, help="Send OpenAI's own fields only; some servers refuse ignore_eos.")
@server("--timeout", type=float, default=600.0, help="Seconds to wait for one answer.")
@what(
    "--scene",
    "scenes",
    type=click.Choice(list(SCENES)),
    multiple=True,
    help="[default: the first three]",
)
@what("--repeats", type=click.IntRange(1), default=1, help="Times to play each scene, always with fresh text.")
@what("--cold/--no-cold", default=True, help="Also play each scene with prompts that share nothing.")
@what("--seed", type=int, help="Of the text.  [default: another one every time]")
@size("--concurrency", type=click.IntRange(1), default=SCALE.concurrency, help="Requests at a time.")
@size("--questions", type=click.IntRange(1), default=SCALE.questions, help="On one document.")
@size("--documents", type=click.IntRange(1), default=SCALE.documents, help="In scenes that have several.")
@size("--document-tokens", type=click.IntRange(1), default=SCALE.document_tokens)
@size("--sessions", type=click.IntRange(1), default=SCALE.sessions, help="Conversations at a time.")
@size("--turns", type=click.IntRange(1), default=SCALE.turns, help="Of each conversation.")
@size("--system-tokens", type=click.IntRange(1), default=SCALE.system_tokens, help="Of the shared system prompt.")
@size("--example-tokens", type=click.IntRange(1), default=SCALE.example_tokens, help="Of the few-shot scene.")
@size("--answer-tokens", type=click.IntRange(1), default=SCALE.answer_tokens)
@size("--samples", type=click.IntRange(1), default=SCALE.samples, help="Of each prompt in the samples scene.")
@size("--streams", type=click.IntRange(1), default=SCALE.streams, help="Answers at a time in the decode scene.")
@size("--decode-tokens", type=click.IntRange(1), default=SCALE.decode_tokens, help="Of each of them.")
@output("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures to a file.")
def command(url: str, json_file: Path | None, **options: Any) -> None:
    """Measure the OpenAI-compatible server at URL.

    Each scene is played twice: with a fresh number in front of every prompt, so that nothing can be shared, and as it
    is. The difference is what the server's prefix cache brings.
    """
    scale = Scale(**{field.name: options[field.name] for field in dataclasses.fields(Scale)})
    seed = options["seed"] if options["seed"] is not None else secrets.randbelow(2**31)
    scenes = [SCENES[name] for name in options["scenes"] or DEFAULT_SCENES]
    plan = Plan(scenes, scale, options["repeats"], options["cold"], seed)
    endpoint = Endpoint(url, options["model"] or "", options["api_key"], options["strict"], options["timeout"])
    try:
        endpoint, summaries = asyncio.run(measure(endpoint, plan))
    except (ServerError, OSError) as exc:
        raise click.ClickException(f"{url}: {exc}") from exc
    show(f"{endpoint.model} at {url}", "prefixes", rows(summaries))
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(endpoint, plan, summaries), indent=1))
    if any(summary.errors for summary in summaries):
        raise SystemExit(1)


async def measure(endpoint: Endpoint, plan: Plan) -> tuple[Endpoint, list[Summary]]:
    if not endpoint.model:
        endpoint = dataclasses.replace(endpoint, model=await first_model(endpoint))
    with CountBar(plan.num_requests) as bar:
        summaries = await play(endpoint, plan, lambda scene, record: bar.advance(scene, record.error))
    return endpoint, summaries


def rows(summaries: list[Summary]) -> list[Row]:
    """Each warm run is compared with the cold run of its scene where there is one."""
    cold = {summary.scene: summary for summary in summaries if summary.cold_prompts}
    return [
        Row(summary.scene, "spoilt", summary)
        if summary.cold_prompts
        else Row(summary.scene, "as sent", summary, cold.get(summary.scene))
        for summary in summaries
    ]


def as_json(endpoint: Endpoint, plan: Plan, summaries: list[Summary]) -> dict[str, Any]:
    return {
        "version": 1,
        "url": endpoint.url,
        "model": endpoint.model,
        "seed": plan.seed,
        "scale": dataclasses.asdict(plan.scale),
        "scenes": [dataclasses.asdict(summary) for summary in summaries],
    }
