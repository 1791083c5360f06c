"""Real text for the scenes: an airline agent's policy and what its users wrote, never twice in the same order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import msgspec

POLICY_CHARACTERS_A_TOKEN = 4.4
MESSAGE_CHARACTERS_A_TOKEN = 3.75
"""Of these texts, in the default model's vocabulary; others are near it. Lengths are aimed at with them; the server
counts exactly."""

QUESTIONS = (
    "Which of these messages is about a cancellation? Quote it and say why.",
    "How many of these people mention travel insurance? List them.",
    "Summarise what the person in message {k} wants in one sentence.",
    "Write the reply that an agent should send to message {k}.",
    "Which cities are named here, and in which messages?",
    "Is anyone here angry? Give the number of the message and the words that show it.",
    "What would you ask the sender of message {k} before doing anything?",
    "Sort the messages from the most to the least urgent.",
)

TOPICS = ("booking", "cancellation", "change of flight", "baggage", "refund", "insurance", "membership")


class Corpus(msgspec.Struct, frozen=True):
    """An excerpt of tau-bench's airline domain, with its source and licence beside it in the file."""

    source: str
    licence: str
    policy: str
    messages: list[str]


@cache
def load_corpus() -> Corpus:
    text = files("caudex.bench").joinpath("airline.json").read_bytes()
    return msgspec.json.decode(text, type=Corpus)


@dataclass(slots=True)
class Writer:
    """Writes prompts from the corpus. Every text begins with a number drawn from `rng`, so that two repeats, or two
    documents of one repeat, differ within their first few tokens and can never hit each other's cache."""

    rng: random.Random

    def nonce(self) -> str:
        return f"{self.rng.randrange(10**9):09d}"

    def system(self, num_tokens: int = 1_500) -> str:
        """An agent's instructions, as long as asked for or as the whole policy."""
        return f"Policy, edition {self.nonce()}.\n\n{fit(load_corpus().policy, num_tokens * POLICY_CHARACTERS_A_TOKEN)}"

    def user_turn(self) -> str:
        return self.rng.choice(load_corpus().messages)

    def document(self, num_tokens: int) -> str:
        """Numbered messages of users, about `num_tokens` long."""
        messages = list(load_corpus().messages)
        self.rng.shuffle(messages)
        limit = num_tokens * MESSAGE_CHARACTERS_A_TOKEN
        lines, length = [f"Messages of week {self.nonce()}."], 0
        for number, message in enumerate(messages, start=1):
            lines.append(f"Message {number}: {message}")
            length += len(lines[-1])
            if length >= limit:
                break
        return fit("\n\n".join(lines), limit)

    def about(self, document: str) -> str:
        """A prompt that ends in a question about a document."""
        return f"{document}\n\n{self.question()}\nAnswer:"

    def examples(self, num_tokens: int) -> str:
        """Labelled messages, as a few-shot prompt has them."""
        lines, length = [f"Task {self.nonce()}: name the topic of a message."], 0
        limit = num_tokens * MESSAGE_CHARACTERS_A_TOKEN
        while length < limit:
            lines.append(f"Message: {self.user_turn()}\nTopic: {self.rng.choice(TOPICS)}")
            length += len(lines[-1])
        return fit("\n\n".join(lines), limit)

    def question(self) -> str:
        text = self.rng.choice(QUESTIONS).format(k=self.rng.randint(1, 20))
        return f"Question {self.nonce()}: {text}"


def fit(text: str, limit: float) -> str:
    """At most `limit` characters of a text's beginning, cut between words."""
    return text if len(text) <= limit else text[: int(limit)].rsplit(" ", 1)[0]
