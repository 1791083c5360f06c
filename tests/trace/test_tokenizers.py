"""Tokenizers by name: tiktoken's own loader on a small local vocabulary, and the copy of a model that was converted."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from caudex.trace.encode import PromptEncoder
from caudex.trace.errors import TraceError
from caudex.trace.render import RequestRenderer
from caudex.trace.tokenizer import load_tokenizer

MERGES = [b"th", b"he", b"the", b" the", b"in", b" c", b"ca", b" ca"]
PLUGIN = """
from tiktoken.load import load_tiktoken_bpe


def small():
    return {{
        "name": "small_local",
        "pat_str": r" ?[a-zA-Z]+|[0-9]| ?[^a-zA-Z0-9\\s]+|\\s+",
        "mergeable_ranks": load_tiktoken_bpe({vocabulary!r}),
        "special_tokens": {{}},
    }}


ENCODING_CONSTRUCTORS = {{"small_local": small}}
"""
COUNT = """
import json, sys
from caudex.trace.tokenizer import load_tokenizer
tokenizer, template = load_tokenizer("small_local")
ids = [array.tolist() for array in tokenizer.encode_batch(sys.argv[1:])]
print(json.dumps([ids, tokenizer.decode(tokenizer.encode_batch(sys.argv[1:2])[0]), tokenizer.description]))
"""


def test_a_tiktoken_encoding_is_loaded_by_tiktoken_itself(tmp_path: Path) -> None:
    """In a process of its own, since tiktoken looks for plug-ins once; the vocabulary file is in tiktoken's format."""
    words = [bytes([value]) for value in range(256)] + MERGES
    vocabulary = tmp_path / "small.tiktoken"
    vocabulary.write_text("".join(f"{base64.b64encode(word).decode()} {rank}\n" for rank, word in enumerate(words)))
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext" / "small_local.py").write_text(PLUGIN.format(vocabulary=str(vocabulary)))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-c", COUNT, "in the cache", "hé 7"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (first, second), decoded, description = json.loads(result.stdout)
    assert first[:2] == [256 + MERGES.index(b"in"), 256 + MERGES.index(b" the")]
    assert [words[token] for token in first] == [b"in", b" the", b" ca", b"c", b"he"]
    assert b"".join(words[token] for token in second) == "hé 7".encode()
    assert (decoded, description) == ("in the cache", "tiktoken small_local")


def test_a_converted_model_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "caudex" / "models" / "Tiny-1M.Q4_1-0123456789ab"
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("Tiny-1M", "maker/tiny-1m"):
        found, _ = load_tokenizer(name)
        assert found.description == f"{name.rsplit('/', 1)[-1]} (3 tokens)"
        assert PromptEncoder(found, RequestRenderer()).encode_texts(["two one two"])[0].tolist() == [2, 1, 2]
    with pytest.raises(TraceError):
        load_tokenizer("no such name!")


def test_bytes_need_nothing() -> None:
    tokenizer, template = load_tokenizer("bytes")
    assert template is None
    assert np.array_equal(tokenizer.encode_batch(["abcd"])[0], np.frombuffer(b"abcd", dtype=np.int32))
