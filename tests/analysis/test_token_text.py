"""Logs of token ids read with the tokenizer that the ids are from: values are named and shown as the text they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.analysis.plants import PLANTS
from tests.analysis.plants.logs import as_prompts, generated
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from caudex.analysis.analyze import analyze
from caudex.analysis.results import Analysis
from caudex.analysis.token_text import TokenText
from caudex.trace.request import Request


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, str]]:
    return as_prompts(generated("chat", 60, seed=5))


@pytest.fixture(scope="module")
def tokenizer(prompts: list[dict[str, str]]) -> Tokenizer:
    """Byte-level BPE, trained on the log itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([body["prompt"] for body in prompts], trainer)
    return tokenizer


def test_ids_come_back_whatever_they_are() -> None:
    """Also those that no vocabulary has, beside the same ids in a text without such."""
    logged = [[5, 9, 5, 0], [9, 2**31 - 1, -7, 5], [1 << 20, (1 << 20) - 1, 9], []]
    mapping = TokenText()
    turned = mapping.requests([Request(line=i, token_ids=ids) for i, ids in enumerate(logged)])
    assert turned is not None
    texts = [request.text or "" for request in turned]
    assert [tokens.tolist() for tokens in mapping.encode_batch(texts)] == logged
    assert texts[0][1] == texts[1][0] == texts[2][2]


def _analysis(log: list[dict[str, str]], tokenizer: Tokenizer, folder: Path, *, told: bool) -> Analysis:
    rows = [{"prompt_token_ids": tokenizer.encode(b["prompt"]).ids, "session_id": b["session_id"]} for b in log]
    file = folder / "ids.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer.save(str(folder / "tokenizer.json"))
    return analyze(file, tokenizer=str(folder / "tokenizer.json") if told else None, policies=["lru"])


@pytest.mark.parametrize(("name", "kind"), [("iso_clock_head", "clock"), ("traceparent", "request_id")])
def test_values_are_named_once_the_ids_can_be_read(
    name: str, kind: str, prompts: list[dict[str, str]], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    log = PLANTS[name].mutate(prompts)
    clean = _analysis(prompts, tokenizer, tmp_path, told=True)
    read = _analysis(log, tokenizer, tmp_path, told=True).breakers[0]
    unread = _analysis(log, tokenizer, tmp_path, told=False).breakers[0]
    assert clean.is_clean
    assert (read.kind, unread.kind) == (kind, "varying_value")
    # The words around the value stay in the mended prompts, which the clean ones do not have.
    assert read.hit_rate_if_mended == pytest.approx(clean.infinite_hit_rate, abs=0.02)
    for example in read.examples:
        assert example.before + example.value in log[example.line - 1]["prompt"]
    assert all(set(example.value) <= set("0123456789 …") for example in unread.examples)
