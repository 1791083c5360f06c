"""Loading a model with transformers so that it can be served."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from caudex.engine.attention import ATTENTION_NAME, AttentionOptions, LayerShape, register_attention
from caudex.engine.config import DTypeName, EngineConfig, KvCacheDTypeName
from caudex.engine.cpu import CheckpointWeights, head_size, weight_shapes, why_unsupported
from caudex.engine.loading import Checkpoint, Progress
from caudex.engine.support import check_config, probe_model
from caudex.engine.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A supported model, its tokenizer, and what its layers ask of attention.

    `module` is transformers' own, or None where the fused runner serves the checkpoint's `weights` without it.
    """

    name: str
    config: Any
    dtype: torch.dtype
    device: torch.device
    module: Any
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer
    layers: Sequence[LayerShape]
    options: Sequence[AttentionOptions]
    eos_token_ids: frozenset[int]

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def position_limit(self) -> int | None:
        """The longest sequence the model has positions for, if it says so."""
        return _position_limit(self.config)

    def kv_bytes_per_token(self, kv_cache_dtype: KvCacheDTypeName) -> int:
        if kv_cache_dtype == "int8":
            return sum(layer.quantized_bytes_per_token for layer in self.layers)
        return sum(layer.bytes_per_token(self.dtype) for layer in self.layers)


def load_model(checkpoint: Checkpoint, config: EngineConfig, progress: Progress) -> LoadedModel:
    """Load weights and tokenizer and see that the model can be served.

    Raises:
        UnsupportedModelError: it cannot; the message says why.
        ValueError: the weights are damaged, or cannot be loaded without running code that they bring.
    """
    name = config.served_model_name or checkpoint.name
    progress("Loading the tokenizer", 0, 3)
    hf_config = _read_config(checkpoint.directory)
    with _readable(checkpoint.directory):
        weights = _plain_weights(checkpoint.directory, hf_config, config)
    if weights is None:
        check_config(hf_config, name, config.max_model_len)
    tokenizer = Tokenizer.load(checkpoint.directory, config.chat_template)
    progress("Loading the weights", 1, 3)
    dtype = choose_dtype(config.dtype, hf_config)
    if weights is None:
        return _load_module(checkpoint.directory, hf_config, dtype, name, tokenizer, config, progress)
    progress("Loading the weights", 3, 3)
    head = head_size(hf_config)
    shape = LayerShape(hf_config.num_key_value_heads, head, head, hf_config.num_attention_heads)
    return LoadedModel(
        name=name,
        config=hf_config,
        dtype=dtype,
        device=torch.device("cpu"),
        module=None,
        weights=weights,
        tokenizer=tokenizer,
        layers=[shape] * hf_config.num_hidden_layers,
        options=[AttentionOptions(head**-0.5)] * hf_config.num_hidden_layers,
        eos_token_ids=_eos_token_ids(_generation_config(checkpoint.directory, hf_config), tokenizer),
    )


def _plain_weights(directory: Path, hf_config: Any, config: EngineConfig) -> CheckpointWeights | None:
    """The weights, if the fused runner can serve them as they are: transformers' model code alone takes 2 s to import.

    A checkpoint with anything unusual (other names, quantised, not in safetensors) is left to transformers.
    """
    if config.attention_backend == "torch" or hasattr(hf_config, "quantization_config"):
        return None
    longest = config.max_model_len or _position_limit(hf_config)
    if longest is None or why_unsupported(hf_config, longest) is not None:
        return None
    weights, shapes = CheckpointWeights.find(directory), weight_shapes(hf_config)
    if weights is None or not shapes.keys() <= weights.keys():
        return None
    places = shapes.keys() | {name.removesuffix(".weight") + ".bias" for name in shapes} | {"lm_head.weight"}
    _warn_of_unused(directory, {name for name in weights if name not in places and "rotary_emb" not in name})
    return weights


def _load_module(
    directory: Path,
    hf_config: Any,
    dtype: torch.dtype,
    name: str,
    tokenizer: Tokenizer,
    config: EngineConfig,
    progress: Progress,
) -> LoadedModel:
    """The model by transformers' own code, with its attention replaced."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    register_attention()
    with _readable(directory), _describing(directory):
        module, found = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _check_found(directory, found)
    module.eval()
    progress("Checking the model", 2, 3)
    probe = probe_model(module, name, config.max_model_len)
    progress("Checking the model", 3, 3)
    return LoadedModel(
        name=name,
        config=hf_config,
        dtype=module.dtype,
        device=module.device,
        module=module,
        weights=module.state_dict(),
        tokenizer=tokenizer,
        layers=probe.layers(),
        options=[probe.options[index] for index in sorted(probe.options)],
        eos_token_ids=_eos_token_ids(module.generation_config, tokenizer),
    )


def _read_config(directory: Path) -> Any:
    """The checkpoint's configuration.

    Raises:
        ValueError: it contradicts itself, or has values that it cannot have.
    """
    from transformers import AutoConfig

    with _describing(directory):
        hf_config = AutoConfig.from_pretrained(directory)
    num_layers = getattr(hf_config.get_text_config(), "num_hidden_layers", 1)
    if num_layers < 1:
        raise ValueError(f"config.json in {directory} describes no model: num_hidden_layers is {num_layers}")
    return hf_config


@contextmanager
def _describing(directory: Path) -> Iterator[None]:
    """Within this context, what a configuration makes transformers stumble over is told with its folder."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"config.json in {directory} describes no model ({said})") from error


def _check_found(directory: Path, found: Mapping[str, Any]) -> None:
    """Refuse a model of which weights were made up because the checkpoint has none, or has others, of their names.

    Args:
        found: transformers' loading info.
    """
    wrong = [f"{name} is missing" for name in sorted(found["missing_keys"])]
    wrong += [f"{name} has shape {tuple(is_)}, not {tuple(due)}" for name, is_, due in sorted(found["mismatched_keys"])]
    if wrong:
        raise ValueError(f"the weights in {directory} are not those of its config.json: {_some_of(wrong)}")
    _warn_of_unused(directory, found["unexpected_keys"])


def _warn_of_unused(directory: Path, names: Collection[str]) -> None:
    """Say which weights of a checkpoint its configuration has no place for: another model's may lie there."""
    if names:
        _log.warning("weights in %s that its config.json has no place for: %s", directory, _some_of(sorted(names)))


def _some_of(items: Sequence[str]) -> str:
    """The first few of a list, and how many more there are."""
    more = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f", and {more} more" if more > 0 else "")


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Within this context, weights that cannot be read are told with their folder and the remedy."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {directory} are damaged ({error}): fetch them again, or delete that folder if "
            "Caudex converted it, and it is made anew"
        ) from error
    except UnpicklingError as error:
        raise ValueError(
            f"the weights in {directory} are pickled and would run code if loaded, or are damaged: get them "
            "as safetensors, or convert them where you trust them (save_pretrained does)"
        ) from error


def choose_dtype(name: DTypeName, hf_config: Any) -> torch.dtype:
    """The dtype named, or for `auto` the checkpoint's own; float16 is slow on CPUs, so bfloat16 stands in for it."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return torch.bfloat16 if hf_config.dtype in (torch.bfloat16, torch.float16) else torch.float32


def _position_limit(hf_config: Any) -> int | None:
    limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def _generation_config(directory: Path, hf_config: Any) -> Any:
    """What the checkpoint says about generating, or its configuration, which older ones said it in."""
    from transformers import GenerationConfig

    return (
        GenerationConfig.from_pretrained(directory) if (directory / "generation_config.json").is_file() else hf_config
    )


def _eos_token_ids(generation_config: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """All tokens that end a text, by the generation config and by the tokenizer."""
    named = getattr(generation_config, "eos_token_id", None)
    ids = named if isinstance(named, list) else [named]
    return frozenset(int(token) for token in (*ids, tokenizer.eos_token_id) if token is not None)
