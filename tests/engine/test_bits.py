"""Rounds of what `bit_sweep` does at length: with LoRA adapters and without, with KV as it comes and in 8 bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from caudex.tiers.stack import TierStack

from .bit_sweep import ADAPTERS, Tally, play_round, save_adapter, save_model


@pytest.mark.parametrize("adapters", [ADAPTERS, ()], ids=["adapters", "plain"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_hit_changes_nothing_but_time(
    adapters: tuple[str, ...], kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TierStack, "note_computed", lambda *_: None)  # So small a model is quicker than any disk.
    model, tally = save_model("llama", tmp_path / "model"), Tally()
    folders = {name: save_adapter(model, tmp_path / name, seed) for seed, name in enumerate(adapters)}
    numerics = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}
    play_round(
        random.Random(13), model, folders, tally, numerics=numerics, num_engines=2, num_bursts=3, share_with_tier=1.0
    )
    circumstances = ("hit", "part of a block hit", "sample of another", "tokens from a tier", "guesses right")
    for circumstance in (*circumstances, "guesses wrong"):
        assert tally.servings[circumstance] > 0, f"this round had nothing of: {circumstance}"
