"""Output whose tokens change between two turns is found from token ids, and told from output that was edited."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from caudex.analysis.analyze import analyze
from caudex.analysis.results import Analysis

Resend = Callable[[list[int]], list[int]]


@pytest.fixture(scope="module")
def tokenizer(tau_bodies: list[dict[str, Any]]) -> Tokenizer:
    """A byte-pair vocabulary trained on the log itself."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    trained.train_from_iterator((m.get("content") or "" for m in tau_bodies[-1]["messages"]), trainer)
    return trained


def _texts(tau_bodies: list[dict[str, Any]]) -> list[str]:
    contents = {m.get("content") or "" for body in tau_bodies for m in body["messages"] if m["role"] != "system"}
    return sorted(text for text in contents if len(text) > 200)


def _sampled(tokenizer: Tokenizer, text: str, rng: random.Random) -> list[int]:
    """Ids that decode to `text`, one word in ten in smaller tokens than the longest there are."""
    ids: list[int] = []
    for word in text.split(" "):
        pieces = [" ", *word] if rng.random() < 0.1 else [f" {word}"]
        ids += [token for piece in pieces for token in tokenizer.encode(piece).ids]
    return ids


def _log(path: Path, tokenizer: Tokenizer, texts: list[str], resend: Resend, *, sessions: bool = True) -> Path:
    rng = random.Random(5)
    rows = []
    for session in range(8):
        prompt = tokenizer.encode(f"{texts[0]}\nOn conversation {session}: {texts[session + 1]}").ids
        for turn in range(5):
            output = _sampled(tokenizer, texts[(7 * session + turn) % len(texts)][:1200], rng)
            row = {"prompt_token_ids": prompt, "output_token_ids": output}
            rows.append({**row, "session_id": f"s{session}"} if sessions else row)
            prompt = [*prompt, *resend(output), *tokenizer.encode(f"\nTurn {turn}: and then?\n").ids]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _analysed(path: Path) -> Analysis:
    return analyze(path, policies=["lru"])


def test_output_sent_back_as_generated_is_clean(
    tokenizer: Tokenizer, tau_bodies: list[dict[str, Any]], tmp_path: Path
) -> None:
    texts = _texts(tau_bodies)
    assert _analysed(_log(tmp_path / "same.jsonl", tokenizer, texts, lambda output: output)).is_clean
    assert _analysed(_log(tmp_path / "no_end.jsonl", tokenizer, texts, lambda output: output[:-1])).is_clean


@pytest.mark.parametrize("sessions", [True, False])
def test_output_tokenised_anew(
    sessions: bool, tokenizer: Tokenizer, tau_bodies: list[dict[str, Any]], tmp_path: Path
) -> None:
    def anew(output: list[int]) -> list[int]:
        again: list[int] = tokenizer.encode(tokenizer.decode(output)).ids
        assert tokenizer.decode(again) == tokenizer.decode(output)
        return again

    log = _log(tmp_path / "log.jsonl", tokenizer, _texts(tau_bodies), anew, sessions=sessions)
    found = _analysed(log)
    first = found.breakers[0]
    assert first.kind == "output_retokenized"
    assert len({example.value for example in first.examples}) == 2
    assert first.requests <= 8 * 4
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert 0 < first.tokens_lost < sum(len(row["output_token_ids"]) for row in rows)
    assert first.hit_rate_if_mended == pytest.approx(found.infinite_hit_rate + first.tokens_lost / found.prompt_tokens)
    line = first.examples[1].line - 1
    at = first.where.token
    assert at is not None
    assert rows[line]["prompt_token_ids"][at] == int(first.examples[1].value.split()[0])


def test_output_without_its_beginning_is_an_edit(
    tokenizer: Tokenizer, tau_bodies: list[dict[str, Any]], tmp_path: Path
) -> None:
    found = _analysed(_log(tmp_path / "log.jsonl", tokenizer, _texts(tau_bodies), lambda output: output[40:]))
    assert found.breakers[0].kind == "output_rewritten"


def test_another_answer_is_a_branch(tokenizer: Tokenizer, tau_bodies: list[dict[str, Any]], tmp_path: Path) -> None:
    other = [token for text in _texts(tau_bodies)[-3:] for token in tokenizer.encode(text.upper()).ids]
    assert _analysed(_log(tmp_path / "log.jsonl", tokenizer, _texts(tau_bodies), lambda _: other[:300])).is_clean
