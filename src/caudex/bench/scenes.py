"""What the benchmark plays: kinds of traffic whose prompts share prefixes, and plain decoding, which shares nothing.

A scene asks through a Player and says of each request whether its prefix is new. It never looks at the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from caudex.bench.player import Player, Scale


@dataclass(frozen=True, slots=True)
class Scene:
    """A named kind of traffic. `count` says how many requests `play` makes at a scale."""

    name: str
    summary: str
    play: Callable[[Player], Awaitable[None]]
    count: Callable[[Scale], int]


async def play_conversation(player: Player) -> None:
    scale = player.scale
    system = player.writer.system(scale.system_tokens)

    async def session(number: int) -> None:
        messages = [{"role": "system", "content": system}]
        for turn in range(scale.turns):
            messages.append({"role": "user", "content": player.writer.user_turn()})
            answer = await player.chat(messages, scale.answer_tokens, first=number == 0 and turn == 0)
            messages.append({"role": "assistant", "content": answer})

    await asyncio.gather(*(session(number) for number in range(scale.sessions)))


async def play_document(player: Player) -> None:
    scale = player.scale
    document = player.writer.document(scale.document_tokens)
    prompts = [player.writer.about(document) for _ in range(scale.questions)]
    await player.together(
        player.complete(prompt, scale.answer_tokens, first=number == 0) for number, prompt in enumerate(prompts)
    )


async def play_decode(player: Player) -> None:
    scale = player.scale
    prompts = [player.writer.document(64) for _ in range(scale.streams)]
    await asyncio.gather(*(player.complete(prompt, scale.decode_tokens, first=True) for prompt in prompts))


async def play_repeat(player: Player) -> None:
    prompt = player.writer.document(player.scale.document_tokens)
    for time in range(REPEATS):
        await player.complete(prompt, 8, first=time == 0)


async def play_round_robin(player: Player) -> None:
    scale = player.scale
    documents = [player.writer.document(scale.document_tokens) for _ in range(scale.documents)]
    prompts = [player.writer.about(document) for _ in range(QUESTIONS_A_DOCUMENT) for document in documents]

    async def arrive(number: int, prompt: str) -> None:
        await asyncio.sleep(number * ARRIVAL_SECONDS)
        await player.complete(prompt, 8, first=number < scale.documents)

    await asyncio.gather(*(arrive(number, prompt) for number, prompt in enumerate(prompts)))


async def play_few_shot(player: Player) -> None:
    scale = player.scale
    examples = player.writer.examples(scale.example_tokens)
    prompts = [f"{examples}\n\nMessage: {player.writer.user_turn()}\nTopic:" for _ in range(scale.questions)]
    await player.together(player.complete(prompt, 8, first=number == 0) for number, prompt in enumerate(prompts))


async def play_samples(player: Player) -> None:
    scale = player.scale
    prompts = [player.writer.about(player.writer.document(scale.system_tokens)) for _ in range(scale.documents)]
    await player.together(
        player.complete(prompt, scale.answer_tokens, first=True, n=scale.samples) for prompt in prompts
    )


async def play_tree(player: Player) -> None:
    scale = player.scale

    async def grow(thought: str, depth: int) -> None:
        step = await player.complete(thought, scale.answer_tokens, first=depth == 0)
        if depth < TREE_DEPTH:
            branches = (f"{thought}{step}\nNext step, idea {branch}:" for branch in range(TREE_BRANCHES))
            await asyncio.gather(*(grow(branch, depth + 1) for branch in branches))

    await grow(player.writer.about(player.writer.document(scale.system_tokens)), 0)


async def play_agents(player: Player) -> None:
    scale = player.scale
    system = player.writer.system()

    async def agent(number: int) -> None:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": player.writer.user_turn()}]
        for step in range(scale.turns):
            call = await player.chat(messages, scale.answer_tokens, first=number == 0 and step == 0)
            result = f"Result of the call: {player.writer.document(TOOL_RESULT_TOKENS)}"
            messages += [{"role": "assistant", "content": call}, {"role": "user", "content": result}]

    await player.together(agent(number) for number in range(scale.sessions))


async def play_mixed(player: Player) -> None:
    """Conversations, with documents that are read once and never again running through the cache beside them."""
    scale = player.scale
    scans = [player.writer.about(player.writer.document(scale.document_tokens)) for _ in range(scale.sessions)]
    reading = player.together(player.complete(prompt, 8, first=True) for prompt in scans)
    await asyncio.gather(play_conversation(player), reading)


REPEATS = 3
QUESTIONS_A_DOCUMENT = 6
ARRIVAL_SECONDS = 0.002
"""Between two arrivals of a round robin: enough to keep their order, too little to let the queue run dry."""
TREE_BRANCHES, TREE_DEPTH = 2, 4
TOOL_RESULT_TOKENS = 200

SCENES: dict[str, Scene] = {
    scene.name: scene
    for scene in (
        Scene(
            "conversation",
            "sessions of several turns under one system prompt; each turn resends the whole history",
            play_conversation,
            lambda scale: scale.sessions * scale.turns,
        ),
        Scene("document", "questions about one long document", play_document, lambda scale: scale.questions),
        Scene(
            "decode",
            "short prompts with nothing in common and longer answers, all at once",
            play_decode,
            lambda scale: scale.streams,
        ),
        Scene("repeat", "one long prompt, and the same again, one at a time", play_repeat, lambda scale: REPEATS),
        Scene(
            "round-robin",
            "questions on several documents in turn, all queued at once; hard on a cache that holds half of them",
            play_round_robin,
            lambda scale: QUESTIONS_A_DOCUMENT * scale.documents,
        ),
        Scene("few-shot", "one set of examples, many short inputs", play_few_shot, lambda scale: scale.questions),
        Scene("samples", "several samples a prompt (self-consistency)", play_samples, lambda scale: scale.documents),
        Scene(
            "tree",
            "thoughts that branch, each from all that led to it (tree search)",
            play_tree,
            lambda scale: sum(TREE_BRANCHES**depth for depth in range(TREE_DEPTH + 1)),
        ),
        Scene(
            "agents",
            "agents under one policy whose tools answer at length",
            play_agents,
            lambda scale: scale.sessions * scale.turns,
        ),
        Scene(
            "mixed",
            "conversations beside one-shot documents that should not push them out",
            play_mixed,
            lambda scale: scale.sessions * (scale.turns + 1),
        ),
    )
}

DEFAULT_SCENES = ("conversation", "document", "decode")
