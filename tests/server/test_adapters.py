"""A LoRA adapter is asked for as a model of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from caudex.engine.config import EngineConfig
from caudex.engine.engine import Engine
from caudex.server.app import create_app
from caudex.server.settings import ServerSettings

from .conftest import Running

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def adapter(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.5)
    folder = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(folder)
    return folder


def test_an_adapter_is_a_model_of_its_own(
    fresh_server: Callable[..., contextlib.AbstractContextManager[Running]], adapter: Path
) -> None:
    prompt = list(range(20))
    with fresh_server(lora_adapters={"law": adapter, "same": adapter}) as server:
        cards = {card.id: card for card in server.openai.models.list()}
        base = next(iter(cards))
        assert list(cards) == [base, "law", "same"]
        assert cards["law"].model_dump()["parent"] == cards[base].model_dump()["root"]
        answers = {name: server.complete(prompt, model=name) for name in cards}
        assert answers["law"]["model"] == "law"
        assert answers["law"]["choices"][0]["text"] != answers[base]["choices"][0]["text"]
        assert answers["law"]["choices"][0]["text"] == answers["same"]["choices"][0]["text"]
        for name in ("law", "same"):
            cached = answers[name]["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == 0, "an adapter's keys and values are its own"
        again = server.complete(prompt, model="law")
        assert again["choices"][0]["text"] == answers["law"]["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert server.post("/v1/completions", prompt=prompt, model="verse").status_code == 404


def test_an_adapter_cannot_have_the_models_name(config: EngineConfig, adapter: Path) -> None:
    engine = Engine.load(replace(config, lora_adapters={"law": adapter}))
    with pytest.raises(ValueError, match="'law' is the model's own name and an adapter's"):
        create_app(engine, ServerSettings(served_model_names=("small", "law")))
