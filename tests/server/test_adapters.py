"""A LoRA adapter is asked for as a model of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

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
    with fresh_server(lora_adapters={"law": adapter}) as server:
        cards = {card.id: card for card in server.openai.models.list()}
        base = next(name for name in cards if name != "law")
        assert cards["law"].model_dump()["parent"] == cards[base].model_dump()["root"]
        answers = {name: server.complete(prompt, model=name) for name in (base, "law")}
        assert answers["law"]["model"] == "law"
        assert answers["law"]["choices"][0]["text"] != answers[base]["choices"][0]["text"]
        assert answers["law"]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "its keys and values are others"
        again = server.complete(prompt, model="law")
        assert again["choices"][0]["text"] == answers["law"]["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert server.post("/v1/completions", prompt=prompt, model="verse").status_code == 404
